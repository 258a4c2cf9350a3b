// The range of each value over its channels, on the CPU.
//
//   range_i = max over c of v_ic - min over c of v_ic
//
// Bytes that must move: V once, 4 bytes per value. A worker takes runs of values, and of these a tile of VL at a time.
// Per value the lanes of one vector hold minima and those of another maxima; at the end the lanes of all values of the
// tile are reduced together. Rows ahead are prefetched. No order matters, so every level finds the same bits.
//
// The last register of a row that is not whole registers begins before the previous one ends: to meet a channel twice
// changes no range. Rows narrower than a register go channel by channel.
//
// Vector minima and maxima may drop a NaN. But a tile's sum is NaN if any channel is, and otherwise only if infinities
// of both signs meet; such a tile goes channel by channel, too.
#include "../dispatch.h"
#include "../ops/value_range.h"
#include "runs.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kRun = 64 * VL;  // values

template <class T>
float careful_range(const T* value, int64_t dv) {  // NaN if a channel is NaN
  float least = __builtin_inff(), most = -least;
  for (int64_t c = 0; c < dv; ++c) {
    const float x = to_float(value[c]);
    if (x != x) return __builtin_nanf("");
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  return most - least;
}

// The ranges of VL values from value i on, or of those that are left.
template <class T>
inline void tile_ranges(const Rows<T>& rows, int64_t i, float* out) {
  const int64_t count = rows.count - i < VL ? rows.count - i : VL;
  F least[VL], most[VL], sum = {};
  if (rows.shape.full) {
    const T* row[VL];
    int64_t far[VL];
    rows.template take<VL>(i, rows.count, row);
    rows.template ahead<VL>(i, 2 * VL, row, far);
    const int registers = rows.shape.registers();
    const int64_t last = rows.d - kStep<T>;  // where the last register begins
    for (int r = 0; r < VL; ++r) {
      F low = splat(__builtin_inff()), high = -low;
      for (int64_t c = 0; c < registers; ++c) {
        F x[kVecs<T>];
        prefetch(row[r], c, far[r]);
        load(row[r] + (c < rows.shape.full ? c * kStep<T> : last), x);
        for (int j = 0; j < kVecs<T>; ++j) {
          low = min(x[j], low);
          high = max(x[j], high);
          sum += x[j];
        }
      }
      least[r] = low;
      most[r] = high;
    }
    if (__builtin_expect(!any_nan(sum), 1)) {
      const F range = reduce_lanes(most, [](F a, F b) { return max(a, b); }) -
                      reduce_lanes(least, [](F a, F b) { return min(a, b); });
      return store_first(out, range, count);
    }
  }
  for (int64_t r = 0; r < count; ++r) out[r] = careful_range(rows.row(i + r), rows.d);
}

template <class T>
void range_heads(const ValueRangeParams& p, const Workers& workers) {
  for_runs(p, p.ranges, 1, workers, 0, kRun, [&](float*) {
    return [&](int64_t head, int64_t begin, int64_t end) {
      const Rows<T> rows{p.v.head(head / p.heads, head % p.heads), end, p.dv, row_shape<T>(p.v.row_bytes)};
      for (int64_t i = begin; i < end; i += VL) tile_ranges(rows, i, p.ranges + head * p.n + i);
    };
  });
}

}  // namespace

void value_range(const ValueRangeParams& p, Call& call) {
  const Workers workers = workers_for(call, p.b * p.heads * p.n * p.v.row_bytes);
  with_read_dtype(p.dtype, [&](auto type) { range_heads<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
