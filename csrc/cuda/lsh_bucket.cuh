// lsh_bucket: the signs of a key's random Fourier features, packed into an integer.
//
//   bucket(j) = sum over q < r of 2^(r - 1 - q) [cos(projection_q . k_j + phase_q) > 0]
//
// Bytes that must move: the chosen keys once. A warp takes one key and computes its r products in fp64, one after the
// other. The cost for 32 anchors per head is negligible; hashing all keys of a head (the LSH-only ablation) reads 9
// rows of projection, which stay in L1.
#pragma once
#include "../ops/lsh_bucket.h"
#include "reduce.cuh"

namespace kvops {
namespace {

constexpr int kBucketThreads = 256, kBucketWarps = kBucketThreads / 32;

template <class T, bool kPaged>
__global__ void __launch_bounds__(kBucketThreads) lsh_bucket_kernel(LshBucketParams p) {
  const int64_t chosen = blockIdx.x * int64_t{kBucketWarps} + threadIdx.x / 32;
  if (chosen >= p.b * p.heads * p.indices.m) return;
  const int64_t head = chosen / p.indices.m, i = chosen % p.indices.m, b = head / p.heads, h = head % p.heads;
  const int64_t index = p.indices.data[b * p.indices.stride_b + h * p.indices.stride_h + i * p.indices.stride_m];
  const int lane = threadIdx.x % 32, d = static_cast<int>(p.d);
  int bucket = -1;
  if (index >= 0 && index < p.n) {
    const T* const key = reinterpret_cast<const T*>(head_rows<kPaged, T>(p.k, b, h).row(index));
    bool finite = true;
    for (int c = lane; c < d; c += 32) finite = finite && is_finite(to_float(key[c]));
    if (__all_sync(kWarp, finite)) {
      bucket = 0;
      for (int q = 0; q < p.r; ++q) {
        double product = 0;
        for (int c = lane; c < d; c += 32) product += static_cast<double>(to_float(key[c])) * p.projection[q * d + c];
        bucket = 2 * bucket + cosine_is_positive(lanes_sum<32>(product) + p.phase[q]);
      }
    }
  }
  if (lane == 0) p.buckets[chosen] = bucket;
}

inline void lsh_bucket_cuda(const LshBucketParams& p, cudaStream_t stream) {
  const int64_t keys = p.b * p.heads * p.indices.m;
  if (keys == 0) return;
  with_read_dtype(p.dtype, [&](auto type) {
    with_pages<decltype(type)>(p.k, [&](auto paged) {
      launch<lsh_bucket_kernel<decltype(type), paged>>(grid_of((keys + kBucketWarps - 1) / kBucketWarps),
                                                       kBucketThreads, 0, stream, p);
    });
  });
}

}  // namespace
}  // namespace kvops
