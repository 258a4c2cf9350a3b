// cluster_mean: the mean score of each cluster of tokens.
//
// Bytes that must move: the scores and the assignment, 8 per token. This implementation reads them twice, the second
// time from L2.
//
// largest_score finds the head's largest |score|, which determines how scores become integers (fixed_point_shift).
// Integers can be added by atomics in any order, so every run, and the CPU, gives the same bits. cluster_sums adds
// them, in the block's shared memory if all clusters fit there, so that neighbouring tokens of one cluster do not
// contend in L2. The block then adds its sums to the global ones. cluster_means divides.
//
// Shared memory adds 32 bits in one instruction, but 64 bits only in a compare-and-swap loop, which takes one round per
// lane that hits the same cluster. Each 64-bit sum is therefore stored as two halves, and the old value of the lower
// half tells whether to carry. If all tokens of a warp belong to one cluster, as neighbours often do, shuffles add them
// first.
#pragma once
#include "clusters.cuh"
#include "reduce.cuh"

namespace kvops {
namespace {

// Sums in two's complement, and counts, per cluster.
struct ClusterSums {
  unsigned long long* sums;
  unsigned* counts;

  __device__ void add(int64_t cluster, unsigned long long sum, unsigned count) const {
    atomicAdd(sums + cluster, sum);
    atomicAdd(counts + cluster, count);
  }
};

// A block's sums, in shared memory.
struct BlockSums {
  static constexpr int64_t kBytes = 12;                 // per cluster
  static constexpr int64_t kMost = 48 * 1024 / kBytes;  // clusters that fit
  unsigned *low, *high, *counts;

  __device__ BlockSums(unsigned* memory, int64_t clusters)
      : low(memory), high(memory + clusters), counts(memory + 2 * clusters) {}

  __device__ unsigned long long sum(int64_t cluster) const {
    return static_cast<unsigned long long>(high[cluster]) << 32 | low[cluster];
  }
  __device__ void add(int64_t cluster, unsigned long long sum, unsigned count) const {
    const unsigned half = static_cast<unsigned>(sum), carry = atomicAdd(low + cluster, half) > ~half;
    atomicAdd(high + cluster, static_cast<unsigned>(sum >> 32) + carry);
    atomicAdd(counts + cluster, count);
  }
};

__device__ inline bool counts(float score, int cluster) {
  return cluster >= 0 && is_finite(score);
}

// The bits of positive floats sort like the floats.
__global__ void __launch_bounds__(kClusterThreads)
    largest_score_kernel(ClusteredTokens x, unsigned* largest, unsigned blocks) {
  unsigned most = 0;
  for_tokens(x, blocks, [&](int64_t, float score, int cluster) {
    if (counts(score, cluster)) most = max(most, __float_as_uint(fabsf(score)));
  });
  most = __reduce_max_sync(kWarp, most);
  if (threadIdx.x % 32 == 0) atomicMax(largest + blockIdx.x / blocks, most);
}

// Adds the block's scores to `sums`.
template <class Sums>
__device__ inline void add_scores(const ClusteredTokens& x, int shift, unsigned blocks, const Sums& sums) {
  for_tokens(x, blocks, [&](int64_t, float score, int cluster) {
    if (!counts(score, cluster)) cluster = -1;
    const unsigned long long value = cluster < 0 ? 0 : static_cast<unsigned long long>(to_fixed_point(score, shift));
    const int first = __shfl_sync(kWarp, cluster, 0);
    if (!__all_sync(kWarp, cluster == first)) {
      if (cluster >= 0) sums.add(cluster, value, 1);
    } else if (first >= 0) {
      const unsigned long long sum = lanes_sum<32>(value);
      if (threadIdx.x % 32 == 0) sums.add(first, sum, 32);
    }
  });
}

__global__ void __launch_bounds__(kClusterThreads)
    cluster_sums_kernel(ClusteredTokens x, const unsigned* largest, ClusterSums all, unsigned blocks, bool shared) {
  DYNAMIC_SHARED(unsigned, memory);
  const int64_t head = blockIdx.x / blocks;
  const int shift = fixed_point_shift(__uint_as_float(largest[head]), x.n);
  const ClusterSums of_head{all.sums + head * x.clusters, all.counts + head * x.clusters};
  if (!shared) return add_scores(x, shift, blocks, of_head);

  const BlockSums own(memory, x.clusters);
  for (int c = threadIdx.x; c < x.clusters; c += kClusterThreads) own.low[c] = own.high[c] = own.counts[c] = 0;
  __syncthreads();  // all are zero
  add_scores(x, shift, blocks, own);
  __syncthreads();  // all have been added
  for (int c = threadIdx.x; c < x.clusters; c += kClusterThreads)
    if (own.counts[c]) of_head.add(c, own.sum(c), own.counts[c]);
}

__global__ void __launch_bounds__(kClusterThreads)
    cluster_means_kernel(ClusterMeanParams p, const unsigned* largest, ClusterSums all) {
  const int64_t i = blockIdx.x * int64_t{kClusterThreads} + threadIdx.x;
  if (i >= p.tokens.b * p.tokens.heads * p.tokens.clusters) return;
  const int shift = fixed_point_shift(__uint_as_float(largest[i / p.tokens.clusters]), p.tokens.n);
  p.means[i] = from_fixed_point(static_cast<int64_t>(all.sums[i]), shift, all.counts[i], p.sum);
}

struct ClusterMeanMemory {
  ClusterSums all;    // [b, Hk, clusters]
  unsigned* largest;  // [b, Hk]

  ClusterMeanMemory(const ClusterMeanParams& p, Sections& sections) {
    const int64_t heads = p.tokens.b * p.tokens.heads, clusters = heads * p.tokens.clusters;
    all = {sections.add<unsigned long long>(clusters), sections.add<unsigned>(clusters)};
    largest = sections.add<unsigned>(heads);
  }
};

inline void cluster_mean_cuda(const ClusterMeanParams& p, void* workspace, cudaStream_t stream) {
  const ClusteredTokens& x = p.tokens;
  const int64_t heads = x.b * x.heads, clusters = heads * x.clusters;
  if (clusters == 0) return;
  const unsigned blocks = token_blocks(x);
  Sections sections{workspace};
  const auto [all, largest] = ClusterMeanMemory(p, sections);
  zero_async(workspace, sections.bytes, stream);
  if (blocks > 0) {
    const bool shared = x.clusters <= BlockSums::kMost;
    launch<largest_score_kernel>(grid_of(heads * blocks), kClusterThreads, 0, stream, x, largest, blocks);
    launch<cluster_sums_kernel>(grid_of(heads * blocks), kClusterThreads, shared ? BlockSums::kBytes * x.clusters : 0,
                                stream, x, largest, all, blocks, shared);
  }
  launch<cluster_means_kernel>(grid_of((clusters + kClusterThreads - 1) / kClusterThreads), kClusterThreads, 0, stream,
                               p, largest, all);
}

}  // namespace
}  // namespace kvops
