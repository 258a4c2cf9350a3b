// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/build_prototypes.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(build_prototypes, BuildPrototypesParams)

namespace {

std::tuple<Tensor, Tensor> build_prototypes(const Tensor& k, const OptionalTensor& sat_indices,
                                            const OptionalTensor& buckets, int64_t num_chunks, int64_t num_buckets,
                                            const OptionalTensor& starts, const OptionalTensor& lengths) {
  Tensor prototypes = k, counts = k;
  const BuildPrototypesParams p =
      check_build_prototypes(k, sat_indices, buckets, num_chunks, num_buckets, starts, lengths, prototypes, counts);
  const int64_t threads = threads_for(p.b * p.heads * p.n * p.k.row_bytes);
  const Scratch scratch("build_prototypes", threads * build_prototypes_scratch(p));
  build_prototypes_cpu(p, scratch.workers(threads));
  return {prototypes, counts};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("build_prototypes", TORCH_BOX(&build_prototypes));
}

}  // namespace kvops
