// Iterates over clustered tokens for cluster_mean and cluster_priority: kClusterTokens of one head per block.
#pragma once
#include "../ops/cluster_mean.h"
#include "vec.cuh"

namespace kvops {
namespace {

constexpr int kClusterThreads = 256, kClusterTokens = 16 * kClusterThreads;

// Blocks per head.
inline unsigned token_blocks(const ClusteredTokens& x) {
  return static_cast<unsigned>((x.n + kClusterTokens - 1) / kClusterTokens);
}

// Calls fn(token, score, cluster) for the block's tokens. The cluster is -1 for tokens without one and past the end, so
// that all lanes of a warp make each call together. Blocks of a head are consecutive.
template <class Fn>
__device__ inline void for_tokens(const ClusteredTokens& x, unsigned blocks, const Fn& fn) {
  const int64_t head = blockIdx.x / blocks, begin = static_cast<int64_t>(blockIdx.x % blocks) * kClusterTokens;
  const float* const scores = x.scores_row(head / x.heads, head % x.heads);
  const int* const assignment = x.assignment_row(head / x.heads, head % x.heads);
  constexpr int kAhead = 4;  // loads in flight
  for (int step = 0; step < kClusterTokens; step += kAhead * kClusterThreads) {
    float score[kAhead];
    int cluster[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t i = begin + step + u * kClusterThreads + threadIdx.x;
      score[u] = i < x.n ? __ldg(scores + i) : 0.0f;
      cluster[u] = i < x.n ? __ldg(assignment + i) : -1;
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t i = begin + step + u * kClusterThreads + threadIdx.x;
      const bool known = cluster[u] >= 0 && cluster[u] < x.clusters;
      fn(i, score[u], known ? cluster[u] : -1);
    }
  }
}

}  // namespace
}  // namespace kvops
