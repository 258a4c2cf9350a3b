// Keys as floats: shared by quadratic_scores and trig_scores, whose arithmetic per key outweighs its conversion.
//
// A block of keys is converted to rows of floats in the order of the channels, padded with zeros, which then stay in
// the L1 cache. Scores are sums over the lanes of one vector per key, added for VL keys at once. A score that is not
// finite becomes NaN.
#pragma once
#include "runs.h"

namespace kvops::KVOPS_ISA {
namespace {

// Floats in a converted row of d channels.
inline int64_t float_width(int64_t d) {
  return (d + 31) / 32 * 32;
}

// Converts a row; the rest of `out` up to `width` becomes 0.
template <class T>
inline void to_floats(const T* row, RowShape shape, int64_t width, float* out) {
  for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
    F x[kVecs<T>];
    load_row(row, x);
    float* const to = out + c * kStep<T>;
    if constexpr (kInOrder<T>) {
      for (int j = 0; j < kVecs<T>; ++j) store(to + j * VL, x[j]);
    } else {
      store(to, zip_low(x[0], x[1]));
      store(to + VL, zip_high(x[0], x[1]));
    }
  });
  for (int64_t c = shape.registers() * kStep<T>; c < width; c += VL) store(out + c, F{});
}

// scores[i] = scale * the sum over the lanes of sums[i], for `count` keys. sums: [count, padded to VL][VL].
inline void store_scores(const float* sums, int64_t count, float scale, float* scores) {
  for (int64_t i = 0; i < count; i += VL) {
    F rows[VL];
    for (int r = 0; r < VL; ++r) rows[r] = load(sums + (i + r) * VL);
    const F score = sum_lanes(rows) * scale;
    store_first(scores + i, score - score == 0.0f ? score : splat(__builtin_nanf("")), count - i < VL ? count - i : VL);
  }
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
