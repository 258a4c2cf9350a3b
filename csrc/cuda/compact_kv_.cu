#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "compact_kv_.cuh"

namespace kvops {
namespace {

void compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const CompactKVParams p = check_compact_kv_(k, v, indices);
  const OnDevice device(k);
  compact_kv__cuda(p, device.stream());
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
