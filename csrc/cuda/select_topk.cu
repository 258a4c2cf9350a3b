#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "select_topk.cuh"

namespace kvops {
namespace {

Tensor select_topk(const Tensor& scores, int64_t k, int64_t sinks, int64_t window, std::optional<int64_t> seq_len,
                   const OptionalTensor& starts, const OptionalTensor& lengths, const OptionalTensor& budgets,
                   bool fill_invalid) {
  Tensor indices = scores;
  const SelectTopkParams p =
      check_select_topk(scores, k, sinks, window, seq_len, starts, lengths, budgets, fill_invalid, indices);
  const OnDevice device(scores);
  const SelectPlan plan = SelectPlan::of(p);
  const Workspace workspace("select_topk", scores, plan.workspace);
  select_topk_cuda(p, plan, workspace.data(), device.stream());
  return indices;
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("select_topk", TORCH_BOX(&select_topk));
}

}  // namespace kvops
