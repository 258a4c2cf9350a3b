// Minima and maxima of stored numbers, without a conversion: shared by lag_score and value_range. A word of a piece is
// one float, or two 16-bit numbers side by side.
#pragma once
#include "math.cuh"
#include "vec.cuh"

namespace kvops {
namespace {

// The min (or max) of each number of two words. NaN propagates.
template <class T, bool Max>
__device__ inline unsigned extreme(unsigned a, unsigned b) {
  if constexpr (sizeof(T) == 4) {
    const float x = __uint_as_float(a), y = __uint_as_float(b);
    return __float_as_uint(Max ? max_nan(x, y) : min_nan(x, y));
  } else {
#ifdef __CUDACC__
    constexpr bool half = std::is_same_v<T, Half>;
    unsigned r;
    if constexpr (half && Max) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    if constexpr (half && !Max) asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    if constexpr (!half && Max) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    if constexpr (!half && !Max) asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    const auto pick = [](unsigned i, unsigned j) {
      const float x = to_float(T{static_cast<uint16_t>(i)}), y = to_float(T{static_cast<uint16_t>(j)});
      return x != x || (Max ? x > y : x < y) ? i : j;
    };
    return pick(a & 0xffffu, b & 0xffffu) | pick(a >> 16, b >> 16) << 16;
#endif
  }
}
template <class T, bool Max>
__device__ inline uint4 extreme(uint4 a, uint4 b) {
  return make_uint4(extreme<T, Max>(a.x, b.x), extreme<T, Max>(a.y, b.y), extreme<T, Max>(a.z, b.z),
                    extreme<T, Max>(a.w, b.w));
}

}  // namespace
}  // namespace kvops
