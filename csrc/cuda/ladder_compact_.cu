#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "ladder_compact_.cuh"

namespace kvops {
namespace {

void ladder_compact_(const std::vector<Tensor>& k, const std::vector<Tensor>& v, const std::vector<int64_t>& plan,
                     const std::vector<int64_t>& layer, const OptionalTensor& inv_freq, bool interleaved) {
  const LadderCall call = check_ladder_compact_(k, v, plan, layer, inv_freq, interleaved);
  const OnDevice device(k[0]);
  const Workspace workspace("ladder_compact_", k[0], ladder_compact__workspace(call.params));
  ladder_compact__cuda(call.params, workspace.data(), device.stream());
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("ladder_compact_", TORCH_BOX(&ladder_compact_));
}

}  // namespace kvops
