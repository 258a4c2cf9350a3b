#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "compact_kv_.cuh"

namespace kvops {
namespace {

void compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const CompactKVParams p = check_compact_kv_(k, v, indices);
  const OnDevice device(k);
  const Workspace workspace("compact_kv_", k, compact_kv__workspace(p));
  compact_kv__cuda(p, workspace.data(), device.stream());
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
