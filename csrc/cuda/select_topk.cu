#include "select_topk.cuh"

namespace kvops {

void launch_select_topk(const SelectTopkParams& p, Call& call) {
  const SelectPlan plan = SelectPlan::of(p);
  select_topk_cuda(p, plan, call.workspace(plan.workspace), stream_of(call));
}

}  // namespace kvops
