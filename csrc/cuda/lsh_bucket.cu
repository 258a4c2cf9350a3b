#include "lsh_bucket.cuh"

namespace kvops {

void launch_lsh_bucket(const LshBucketParams& p, Call& call) {
  lsh_bucket_cuda(p, stream_of(call));
}

}  // namespace kvops
