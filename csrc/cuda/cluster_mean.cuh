// cluster_mean: the mean score of each cluster of tokens.
//
// Bytes that must move: the scores and the assignment, 8 for each token; here twice, the second time out of L2.
//
// largest_score finds the head's largest |score|, which says how scores become integers (fixed_point_shift). Integers
// are added by atomics in any order, so the same bits come out of every run, and of the CPU. cluster_sums does it: in
// the block's shared memory as long as all clusters fit there, so that the neighbouring tokens of one cluster do not
// meet in L2; what a block has added then goes to the sums of all. cluster_means divides. Not yet measured on a GPU.
#pragma once
#include "clusters.cuh"

namespace kvops {
namespace {

// Sums and counts of clusters, in shared or global memory.
struct ClusterSums {
  unsigned long long* sums;  // of two's complement
  unsigned* counts;

  static constexpr int64_t kBytes = 12;                   // of a cluster
  static constexpr int64_t kShared = 48 * 1024 / kBytes;  // clusters that a block's shared memory has room for

  KVOPS_HOST_DEVICE static ClusterSums at(void* memory, int64_t clusters) {
    unsigned long long* const sums = static_cast<unsigned long long*>(memory);
    return {sums, reinterpret_cast<unsigned*>(sums + clusters)};
  }
  __device__ void add(int64_t cluster, unsigned long long sum, unsigned count) const {
    atomicAdd(sums + cluster, sum);
    atomicAdd(counts + cluster, count);
  }
};

__device__ inline bool counts(float score, int cluster) {
  return cluster >= 0 && is_finite(score);
}

// The bits of a positive float have its order.
__global__ void __launch_bounds__(kClusterThreads)
    largest_score_kernel(ClusteredTokens x, unsigned* largest, unsigned blocks) {
  unsigned most = 0;
  for_tokens(x, blocks, [&](int64_t, float score, int cluster) {
    if (counts(score, cluster)) most = max(most, __float_as_uint(fabsf(score)));
  });
  most = __reduce_max_sync(kWarp, most);
  if (threadIdx.x % 32 == 0) atomicMax(largest + blockIdx.x / blocks, most);
}

__global__ void __launch_bounds__(kClusterThreads)
    cluster_sums_kernel(ClusteredTokens x, const unsigned* largest, ClusterSums all, unsigned blocks, bool shared) {
  DYNAMIC_SHARED(unsigned long long, memory);
  const int64_t head = blockIdx.x / blocks;
  const int shift = fixed_point_shift(__uint_as_float(largest[head]), x.n);
  const ClusterSums of_head{all.sums + head * x.clusters, all.counts + head * x.clusters};
  const ClusterSums own = shared ? ClusterSums::at(memory, x.clusters) : of_head;
  if (shared) {
    for (int c = threadIdx.x; c < x.clusters; c += kClusterThreads) own.sums[c] = own.counts[c] = 0;
    __syncthreads();  // all are zero
  }
  for_tokens(x, blocks, [&](int64_t, float score, int cluster) {
    if (counts(score, cluster)) own.add(cluster, static_cast<unsigned long long>(to_fixed_point(score, shift)), 1u);
  });
  if (!shared) return;
  __syncthreads();  // all have been added
  for (int c = threadIdx.x; c < x.clusters; c += kClusterThreads)
    if (own.counts[c]) of_head.add(c, own.sums[c], own.counts[c]);
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
    const bool shared = x.clusters <= ClusterSums::kShared;
    launch<largest_score_kernel>(grid_of(heads * blocks), kClusterThreads, 0, stream, x, largest, blocks);
    launch<cluster_sums_kernel>(grid_of(heads * blocks), kClusterThreads, shared ? ClusterSums::kBytes * x.clusters : 0,
                                stream, x, largest, all, blocks, shared);
  }
  launch<cluster_means_kernel>(grid_of((clusters + kClusterThreads - 1) / kClusterThreads), kClusterThreads, 0, stream,
                               p, largest, all);
}

}  // namespace
}  // namespace kvops
