#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "build_prototypes.cuh"

namespace kvops {
namespace {

std::tuple<Tensor, Tensor> build_prototypes(const Tensor& k, const OptionalTensor& sat_indices,
                                            const OptionalTensor& buckets, int64_t num_chunks, int64_t num_buckets,
                                            const OptionalTensor& starts, const OptionalTensor& lengths) {
  Tensor prototypes = k, counts = k;
  const BuildPrototypesParams p =
      check_build_prototypes(k, sat_indices, buckets, num_chunks, num_buckets, starts, lengths, prototypes, counts);
  check_head_dim("build_prototypes", "k", k);
  const OnDevice device(k);
  build_prototypes_cuda(p, device.stream());
  return {prototypes, counts};
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("build_prototypes", TORCH_BOX(&build_prototypes));
}

}  // namespace kvops
