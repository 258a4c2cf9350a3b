#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "lsh_bucket.cuh"

namespace kvops {
namespace {

Tensor lsh_bucket(const Tensor& k, const Tensor& indices, const Tensor& projection, const Tensor& phase) {
  Tensor buckets = k;
  const LshBucketParams p = check_lsh_bucket(k, indices, projection, phase, buckets);
  const OnDevice device(k);
  lsh_bucket_cuda(p, device.stream());
  return buckets;
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("lsh_bucket", TORCH_BOX(&lsh_bucket));
}

}  // namespace kvops
