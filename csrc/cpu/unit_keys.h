// Norms and sums of keys, tile by tile: shared by anchor_cosine, outlier_degree and build_prototypes.
//
// A tile is VL rows. Their VL dot products are reduced together into one vector (sum_lanes). One compare per tile finds
// rows whose squared norm is outside the safe fp32 range (zero, NaN, infinite, subnormal); these are redone in double.
#pragma once
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kAheadRows = 2 * VL;              // prefetch distance
constexpr float kTiny = 0x1p-90f, kHuge = 0x1p90f;  // squared norms between these are safe in fp32
constexpr float kRedo = -1.0f;                      // stands in for 1/|k|: redo this row in double

template <class T>
struct Tile {
  const T* row[VL];
  int64_t far[VL];  // byte offset from there to the prefetched row
  int64_t count;

  // Rows [i, i + VL) below `end`; the last is repeated to fill the tile.
  Tile(const Rows<T>& rows, int64_t i, int64_t end) : count(end - i < VL ? end - i : VL) {
    rows.template take<VL>(i, end, row);
    rows.template ahead<VL>(i, kAheadRows, row, far);
  }

  F squared_norms(RowShape shape) const {
    return sums(shape, [](F x, int64_t) { return x; });
  }

  F dots(RowShape shape, const float* direction) const {
    return sums(shape, [&](F, int64_t at) { return load(direction + at); });
  }

  // total[channel] += sum over rows of weight[r] * row[r].
  void accumulate(RowShape shape, const float* weight, float* total) const {
    for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
      F sums[kVecs<T>];
      for (int j = 0; j < kVecs<T>; ++j) sums[j] = load(total + (c * kVecs<T> + j) * VL);
#pragma GCC unroll 16
      for (int r = 0; r < VL; ++r) {
        F x[kVecs<T>];
        load_row(row[r], x);
        for (int j = 0; j < kVecs<T>; ++j) sums[j] += x[j] * weight[r];
      }
      for (int j = 0; j < kVecs<T>; ++j) store(total + (c * kVecs<T> + j) * VL, sums[j]);
    });
  }

 private:
  // For each row, the sum of x times factor(x, its place in register order). Goes row by row, as they lie in memory:
  // the hardware prefetcher follows that, but not sixteen rows at once.
  template <class Factor>
  F sums(RowShape shape, const Factor& factor) const {
    F sums[VL];
#pragma GCC unroll 16
    for (int r = 0; r < VL; ++r) {
      F sum = {};
      for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
        F x[kVecs<T>];
        prefetch(row[r], c, far[r]);
        load_row(row[r], x);
        for (int j = 0; j < kVecs<T>; ++j) sum += x[j] * factor(x[j], (c * kVecs<T> + j) * VL);
      });
      sums[r] = sum;
    }
    return sum_lanes(sums);
  }
};

template <class T>
double careful_norm(const T* row, int64_t d) {  // NaN if the row is not finite
  double squares = 0;
  for (int64_t c = 0; c < d; ++c) {
    const float x = to_float(row[c]);
    squares += is_finite(x) ? double(x) * x : __builtin_nan("");
  }
  return __builtin_sqrt(squares);
}

// Computes the tile's 1/|k| (or a stand-in: NaN for a non-finite key, 0 for a zero key, kRedo). If `total` is given,
// adds the unit keys to it, or the keys times `unit`.
template <class T>
inline void norms(const Rows<T>& rows, int64_t i, int64_t end, float* inverse_norms, float* total, bool normalize,
                  float unit = 1.0f) {
  const Tile<T> tile(rows, i, end);
  const F squares = tile.squared_norms(rows.shape);
  const F inverse = 1.0f / sqrt(squares);
  float weight[VL];
  store(weight, normalize ? inverse : splat(unit));
  for (int64_t r = tile.count; r < VL; ++r) weight[r] = 0.0f;
  // Safe squares lie in (kTiny, kHuge); anything else, NaN included, becomes NaN here.
  const I comfortable = (squares > kTiny) & (squares < kHuge);
  if (__builtin_expect(!any_nan(comfortable ? squares : splat(__builtin_nanf(""))), 1)) {
    store_first(inverse_norms, inverse, tile.count);
    if (total) tile.accumulate(rows.shape, weight, total);
    return;
  }
  store_first(inverse_norms, comfortable ? inverse : splat(kRedo), tile.count);
  for (int64_t r = 0; r < tile.count; ++r) {
    const double norm = careful_norm(tile.row[r], rows.d);
    if (inverse_norms[r] == kRedo && !(norm > 0)) inverse_norms[r] = norm == 0 ? 0.0f : __builtin_nanf("");
    if (!total || !(norm > 0)) continue;
    const double factor = normalize ? 1.0 / norm : unit;
    for (int64_t c = 0; c < rows.d; ++c)
      total[channel_slot<T>(c)] += static_cast<float>(to_float(tile.row[r][c]) * factor);
  }
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
