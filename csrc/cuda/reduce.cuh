// Sums over the lanes that share a row. All lanes of the warp must take part.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

// Every lane gets the sum over its group of kLanes neighbouring lanes. All lanes add in the same order.
template <int kLanes, class T>
__device__ inline T lanes_sum(T x) {
#pragma unroll
  for (int step = kLanes / 2; step; step /= 2) x += __shfl_xor_sync(kWarp, x, step);
  return x;
}

// The sums of N rows over the kLanes lanes that share them, all at once: in each step half of the rows go to each half
// of the lanes, until each lane has one row. Lane l of the group gets, in x[0], the sum of row l / (kLanes / N).
template <int kLanes, int N>
__device__ inline float rows_sum(float (&x)[N]) {
#pragma unroll
  for (int left = N / 2; left; left /= 2) {
    const int step = kLanes / N * left;
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float mine = upper ? x[left + i] : x[i], other = upper ? x[i] : x[left + i];
      x[i] = mine + __shfl_xor_sync(kWarp, other, step);
    }
  }
  return lanes_sum<kLanes / N>(x[0]);
}

}  // namespace
}  // namespace kvops
