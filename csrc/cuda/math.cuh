// Single-instruction arithmetic that C++ has no name for.
#pragma once
#include "device.cuh"

namespace kvops {
namespace {

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// 2^x; 0 where the result would be subnormal.
__device__ inline float exp2_fast(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// The square root to within an ulp, in one instruction; 0 where x is subnormal.
__device__ inline float sqrt_fast(float x) {
#ifdef __CUDACC__
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return sqrtf(x);
#endif
}

// For numbers far from the limits of fp32; infinity for 0.
__device__ inline float rsqrt_fast(float x) {
#ifdef __CUDACC__
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / sqrtf(x);
#endif
}

// NaN propagates, so that non-finite values never vanish from a range.
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
