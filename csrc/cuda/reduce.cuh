// Sums and the like over the lanes that share a row. All lanes of the warp must take part.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

// Every lane gets what `op` makes of its group of kLanes lanes, kStride apart. All lanes combine in the same order.
template <int kLanes, int kStride = 1, class T, class Op>
__device__ inline T lanes_reduce(T x, const Op& op) {
#pragma unroll
  for (int step = kLanes / 2; step; step /= 2) x = op(x, __shfl_xor_sync(kWarp, x, kStride * step));
  return x;
}
template <int kLanes, class T>
__device__ inline T lanes_sum(T x) {
  return lanes_reduce<kLanes>(x, [](T a, T b) { return a + b; });
}

// The sums (or whatever `op` combines) of N rows over the kLanes lanes that share them, all at once: in each step half
// of the rows go to each half of the lanes, until each lane has one row. Lane l of the group gets that of row l /
// (kLanes / N).
template <int kLanes, int kStride = 1, int N, class T, class Op>
__device__ inline T rows_reduce(T (&x)[N], const Op& op) {
#pragma unroll
  for (int left = N / 2; left; left /= 2) {
    const int step = kStride * (kLanes / N) * left;
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const T mine = upper ? x[left + i] : x[i], other = upper ? x[i] : x[left + i];
      x[i] = op(mine, __shfl_xor_sync(kWarp, other, step));
    }
  }
  return lanes_reduce<kLanes / N, kStride>(x[0], op);
}
template <int kLanes, int kStride = 1, int N>
__device__ inline float rows_sum(float (&x)[N]) {
  return rows_reduce<kLanes, kStride>(x, [](float a, float b) { return a + b; });
}

}  // namespace
}  // namespace kvops
