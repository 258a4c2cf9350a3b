// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/lsh_bucket.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(lsh_bucket, LshBucketParams)

namespace {

Tensor lsh_bucket(const Tensor& k, const Tensor& indices, const Tensor& projection, const Tensor& phase) {
  Tensor buckets = k;
  const LshBucketParams p = check_lsh_bucket(k, indices, projection, phase, buckets);
  const int64_t threads = threads_for(p.b * p.heads * p.indices.m * p.k.row_bytes * p.r);
  const Scratch scratch("lsh_bucket", lsh_bucket_scratch(p, threads));
  lsh_bucket_cpu(p, scratch.workers(threads));
  return buckets;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("lsh_bucket", TORCH_BOX(&lsh_bucket));
}

}  // namespace kvops
