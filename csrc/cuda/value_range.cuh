// The range of each value over its channels.
//
//   range_i = max over c of v_ic - min over c of v_ic
//
// Bytes that must move: V once, 4 bytes per value. kLanes lanes share a row, and each lane group takes kRangeValues
// neighbouring values: the loads of all of them are in flight before the first is used, 64 bytes or more per lane, and
// a warp writes neighbouring ranges. Minima and maxima are taken in the stored dtype, two 16-bit numbers per
// instruction: first within a lane, then over the lanes, for all values of a group at once. They do not depend on the
// order, so the bits are those of the CPU.
//
// Minima and maxima have no use for zeros: in place of pieces that a row lacks, a lane repeats its own, or the row's
// first. Grid: x runs over (batch, head, tile of values). Not yet measured on a GPU.
#pragma once
#include "../ops/value_range.h"
#include "extreme.cuh"
#include "reduce.cuh"

namespace kvops {
namespace {

constexpr int kRangeThreads = 256;
template <class Lanes>
constexpr int kRangeValues = 4 / Lanes::kPieces > 1 ? 4 / Lanes::kPieces : 1;  // per lane group
template <class Lanes>
constexpr int kRangeTile = kRangeThreads / Lanes::kLanes * kRangeValues<Lanes>;  // values per block

// The min (or max) of each of N rows. Lane l of those that share them gets that of row l / (kLanes / N).
template <class T, bool Max, class Lanes, int N>
__device__ inline float extreme_of_rows(const uint4 (&raw)[N][Lanes::kPieces]) {
  unsigned words[N];
#pragma unroll
  for (int u = 0; u < N; ++u) {
    uint4 four = raw[u][0];
#pragma unroll
    for (int j = 1; j < Lanes::kPieces; ++j) four = extreme<T, Max>(four, raw[u][j]);
    words[u] = extreme<T, Max>(extreme<T, Max>(four.x, four.y), extreme<T, Max>(four.z, four.w));
  }
  const unsigned word = rows_reduce<Lanes::kLanes>(words, [](unsigned a, unsigned b) { return extreme<T, Max>(a, b); });
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word);
  } else {
    const float low = to_float(T{static_cast<uint16_t>(word & 0xffffu)});
    const float high = to_float(T{static_cast<uint16_t>(word >> 16)});
    return Max ? max_nan(low, high) : min_nan(low, high);
  }
}

template <class T, class Lanes, bool kPaged>
__global__ void __launch_bounds__(kRangeThreads) value_range_kernel(ValueRangeParams p, unsigned tiles, bool wide) {
  constexpr int kValues = kRangeValues<Lanes>, kPieces = Lanes::kPieces, kSame = Lanes::kLanes / kValues;
  const unsigned heads = static_cast<unsigned>(p.heads), head = blockIdx.x / tiles, b = head / heads;
  const unsigned first = static_cast<unsigned>(p.slots.first(b)), count = static_cast<unsigned>(p.slots.count(b));
  const unsigned begin = blockIdx.x % tiles * kRangeTile<Lanes> + threadIdx.x / Lanes::kLanes * kValues;
  const int lane = threadIdx.x % Lanes::kLanes, pieces = static_cast<int>(p.v.row_bytes / 16);
  HeadRows rows = head_rows<kPaged, T>(p.v, b, head % heads).from(begin);
  rows.data += lane < pieces ? lane * kPieceBytes<T> : 0;

  uint4 raw[kValues][kPieces];
  const auto load = [&](auto rows_are_wide) {
#pragma unroll
    for (int u = 0; u < kValues; ++u) {
      const bool there = begin + u - first < count;
      const char* const row = rows.row(u, there);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int at = lane + j * Lanes::kLanes < pieces ? j * Lanes::kLanes * kPieceBytes<T> : 0;
        raw[u][j] = there ? load_piece<T, decltype(rows_are_wide)::value>(row + at) : uint4{};
      }
    }
  };
  wide ? load(std::true_type{}) : load(std::false_type{});

  const float most = extreme_of_rows<Value<T>, true, Lanes>(raw);
  const float least = extreme_of_rows<Value<T>, false, Lanes>(raw);
  const unsigned slot = begin + lane / kSame;
  if (lane % kSame == 0 && slot < p.n) p.ranges[head * p.n + slot] = slot - first < count ? most - least : CUDART_NAN_F;
}

inline void value_range_cuda(const ValueRangeParams& p, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  if (heads * p.n == 0) return;
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_lanes<T>(p.dv / kPiece<T>, [&](auto lanes) {
      using Lanes = decltype(lanes);
      const int64_t tiles = (p.n + kRangeTile<Lanes> - 1) / kRangeTile<Lanes>;
      with_pages<T>(p.v, [&](auto paged) {
        launch<value_range_kernel<T, Lanes, paged>>(grid_of(heads * tiles), kRangeThreads, 0, stream, p,
                                                    static_cast<unsigned>(tiles), aligned_rows(p.v, p.b, p.heads, p.n));
      });
    });
  });
}

}  // namespace
}  // namespace kvops
