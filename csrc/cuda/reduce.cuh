// Sums over the lanes that share a row, all lanes of the warp taking part, and extremes that NaN wins.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

// Every lane gets the sum over its group of kLanes neighbouring lanes, added in the same order in all of them.
template <int kLanes, class T>
__device__ inline T lanes_sum(T x) {
#pragma unroll
  for (int step = kLanes / 2; step; step /= 2) x += __shfl_xor_sync(kWarp, x, step);
  return x;
}

// NaN, if there is one, wins: what is not finite must not slip out of a range.
__device__ inline float min_nan(float a, float b) {
#ifdef __CUDACC__
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return a != a || b != b ? CUDART_NAN_F : a < b ? a : b;
#endif
}
__device__ inline float max_nan(float a, float b) {
#ifdef __CUDACC__
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return a != a || b != b ? CUDART_NAN_F : a < b ? b : a;
#endif
}

}  // namespace
}  // namespace kvops
