// cluster_priority: token priorities that make select_topk keep whole clusters, best first.
//
//   before(c) = total size of the clusters that come before c: higher score, or equal score and lower index
//   c is kept whole if before(c) + size(c) <= k; otherwise it straddles the budget if before(c) < k
//
// Bytes that must move: the assignment twice, the scores once, and the priority written: 16 per token.
//
// cluster_sizes counts with integer atomics, in the block's shared memory if the clusters fit there. cluster_order
// compares each cluster with all others: each thread has one cluster, and the block streams the others through shared
// memory. The cost is negligible for 500 clusters; for 16384 clusters in each of 8 heads it is two billion comparisons.
// It stores k - before(c), from which token_priority derives the priority of each token.
#pragma once
#include "../ops/cluster_priority.h"
#include "clusters.cuh"
#include "select.cuh"

namespace kvops {
namespace {

constexpr int64_t kSharedSizes = 48 * 1024 / 4;  // clusters whose sizes fit in a block's shared memory

__global__ void __launch_bounds__(kClusterThreads)
    cluster_sizes_kernel(ClusteredTokens x, int* sizes, unsigned blocks, bool shared) {
  DYNAMIC_SHARED(int, memory);
  int* const of_head = sizes + blockIdx.x / blocks * x.clusters;
  int* const own = shared ? memory : of_head;
  if (shared) {
    for (int c = threadIdx.x; c < x.clusters; c += kClusterThreads) own[c] = 0;
    __syncthreads();  // all are zero
  }
  for_tokens(x, blocks, [&](int64_t, float, int cluster) {
    if (cluster >= 0) atomicAdd(own + cluster, 1);
  });
  if (!shared) return;
  __syncthreads();  // all have been counted
  for (int c = threadIdx.x; c < x.clusters; c += kClusterThreads)
    if (own[c]) atomicAdd(of_head + c, own[c]);
}

// left[c] = k - before(c); also the number of tokens kept over all clusters.
__global__ void __launch_bounds__(kClusterThreads)
    cluster_order_kernel(ClusterPriorityParams p, const int* sizes, int* left, unsigned blocks) {
  __shared__ unsigned keys[kClusterThreads];
  __shared__ int others[kClusterThreads];
  const int64_t head = blockIdx.x / blocks, clusters = p.tokens.clusters;
  const int64_t c = blockIdx.x % blocks * int64_t{kClusterThreads} + threadIdx.x;
  const float* const scores = p.cluster_scores + head * clusters;
  sizes += head * clusters;
  const unsigned key = c < clusters ? order_key(scores[c]) : 0u;  // NaN is 1: below everything else
  int before = 0;
  for (int64_t base = 0; base < clusters; base += kClusterThreads) {
    const int64_t other = base + threadIdx.x;
    __syncthreads();  // the previous ones have been compared
    keys[threadIdx.x] = other < clusters ? order_key(scores[other]) : 0u;
    others[threadIdx.x] = other < clusters ? sizes[other] : 0;
    __syncthreads();  // these are written
    const int lower = static_cast<int>(min(max(c - base, int64_t{0}), int64_t{kClusterThreads}));
    // Ties to the lower index. No branch and no load that depends on a comparison, so that the loads overlap.
#pragma unroll 16
    for (int i = 0; i < kClusterThreads; ++i) {
      const unsigned wins_from = i < lower ? key : key + 1;
      const int size = others[i];
      before += keys[i] >= wins_from ? size : 0;
    }
  }
  if (c >= clusters) return;
  const int most = static_cast<int>(min(p.k, p.tokens.n)), size = sizes[c];
  const int rest = (p.budgets ? max(0, min(p.budgets[head], most)) : most) - before;
  left[head * clusters + c] = rest;
  const int kept = size <= rest ? size : p.whole || rest < 0 ? 0 : rest;
  if (kept) atomicAdd(p.kept + head, kept);
}

__global__ void __launch_bounds__(kClusterThreads)
    token_priority_kernel(ClusterPriorityParams p, const int* sizes, const int* left, unsigned blocks) {
  const int64_t head = blockIdx.x / blocks, clusters = p.tokens.clusters;
  float* const priority = p.priority + head * p.tokens.n;
  sizes += head * clusters;
  left += head * clusters;
  for_tokens(p.tokens, blocks, [&](int64_t i, float score, int cluster) {
    float x = CUDART_NAN_F;
    if (cluster >= 0) {
      const int rest = left[cluster];
      if (sizes[cluster] <= rest)
        x = CUDART_INF_F;
      else if (rest <= 0 || p.whole)
        x = -CUDART_INF_F;
      else
        x = is_finite(score) ? score : -CUDART_MAX_NORMAL_F;
    }
    if (i < p.tokens.n) priority[i] = x;
  });
}

struct ClusterPriorityMemory {
  int *sizes, *left;  // [b, Hk, clusters]: tokens, and what is left of k for them

  ClusterPriorityMemory(const ClusterPriorityParams& p, Sections& sections) {
    const int64_t clusters = p.tokens.b * p.tokens.heads * p.tokens.clusters;
    sizes = sections.add<int>(clusters);
    left = sections.add<int>(clusters);
  }
};

inline void cluster_priority_cuda(const ClusterPriorityParams& p, void* workspace, cudaStream_t stream) {
  const ClusteredTokens& x = p.tokens;
  const int64_t heads = x.b * x.heads, clusters = heads * x.clusters;
  if (heads == 0) return;
  zero_async(p.kept, 4 * heads, stream);
  const unsigned blocks = token_blocks(x);
  if (blocks == 0) return;
  Sections sections{workspace};
  const auto [sizes, left] = ClusterPriorityMemory(p, sections);
  zero_async(sizes, 4 * clusters, stream);
  const bool shared = x.clusters <= kSharedSizes;
  const unsigned orders = static_cast<unsigned>((x.clusters + kClusterThreads - 1) / kClusterThreads);
  launch<cluster_sizes_kernel>(grid_of(heads * blocks), kClusterThreads, shared ? 4 * x.clusters : 0, stream, x, sizes,
                               blocks, shared);
  launch<cluster_order_kernel>(grid_of(heads * orders), kClusterThreads, 0, stream, p, sizes, left, orders);
  launch<token_priority_kernel>(grid_of(heads * blocks), kClusterThreads, 0, stream, p, sizes, left, blocks);
}

}  // namespace
}  // namespace kvops
