// TriAttention scores.
//
//   score_i = sum_c center_c k_ic + sum_f norm_f |k_if|        |k_if|: the norm of the channels that RoPE rotates by f
//
// Bytes that must move: K once, 4 bytes per query head and key. A lane owns two units of a key that hold whole pairs
// (rope.cuh), so it needs no other lane's data until the end, when the lanes of a key add their parts. A lane group
// takes kTrigKeys keys at a time, so each center and norm, read through L1, serves that many keys. Four query heads are
// multiplied at a time; the keys of a group with more are read again from L1 or L2.
//
// Scores of four heads take about 40 multiply-adds per 16 bytes of bf16 keys, less than reading them. Lane groups take
// neighbouring keys, so that a warp writes neighbouring scores.
//
// Grid: x runs over (batch, head, tile of keys). Not yet measured on a GPU.
#pragma once
#include "../ops/trig_scores.h"
#include "move.cuh"
#include "rope.cuh"

namespace kvops {
namespace {

constexpr int kTrigThreads = 256, kTrigHeads = 4;

// Elements of T in a unit, and the keys that a lane group takes at a time: up to 64 elements per lane.
template <class T, class Unit>
constexpr int kUnitElements = sizeof(Unit) / sizeof(T);
template <class T, class Unit>
constexpr int kTrigKeys = kUnitElements<T, Unit> > 8 ? 2 : 4;

// Calls fn(Unit{}) with the widest unit that divides all addresses and half a rotated row.
template <class T, class Fn>
inline void with_pair_unit(uint64_t bits, const Fn& fn) {
  if (bits % 16 == 0) return fn(uint4{});
  if constexpr (sizeof(T) == 1) return fn(static_cast<unsigned char>(0));
  if constexpr (sizeof(T) == 2) return fn(static_cast<unsigned short>(0));
  if constexpr (sizeof(T) == 4) return fn(0u);
}

template <class T, class Unit, bool kPaged>
__global__ void __launch_bounds__(kTrigThreads) trig_scores_kernel(TrigScoresParams p, int lanes_log2, unsigned tiles) {
  constexpr int kEach = kUnitElements<T, Unit>, kKeys = kTrigKeys<T, Unit>;
  const RowUnits row = {static_cast<int>(p.d) / kEach, static_cast<int>(p.pairs) / kEach, p.interleaved};
  const int lanes = 1 << lanes_log2, groups = kTrigThreads >> lanes_log2, own = threadIdx.x & (lanes - 1);
  const int64_t head = blockIdx.x / tiles, b = head / p.heads, h = head % p.heads;
  const int64_t first = p.slots.first(b), last = first + p.slots.count(b);
  const int64_t begin = static_cast<int64_t>(blockIdx.x % tiles) * groups * kKeys + (threadIdx.x >> lanes_log2);
  const HeadRows rows = head_rows<kPaged, T>(p.k, b, h);

  for (int64_t quad = 0; quad < p.group; quad += kTrigHeads) {
    float sums[kKeys][kTrigHeads] = {};
    for (int lane = own; lane < row.lanes(); lane += lanes) {
      const RowUnits::Two mine = row.owned(lane);
      const bool has_second = mine.second < row.units, turns = lane < row.turning;
      float x[kKeys][2 * kEach];
#pragma unroll
      for (int u = 0; u < kKeys; ++u) {
        const int64_t slot = begin + u * groups;
        const bool there = first <= slot && slot < last;
        const Unit* const from = reinterpret_cast<const Unit*>(rows.row(slot, there));
        const Unit unit[2] = {there ? from[mine.first] : Unit{}, there && has_second ? from[mine.second] : Unit{}};
        T stored[2 * kEach];
        memcpy(stored, unit, sizeof(unit));
#pragma unroll
        for (int c = 0; c < 2 * kEach; ++c) x[u][c] = to_float(stored[c]);
      }
      const float* centers[kTrigHeads];
#pragma unroll
      for (int g = 0; g < kTrigHeads; ++g) centers[g] = p.centers.row(b, h * p.group + min(quad + g, p.group - 1));
#pragma unroll
      for (int c = 0; c < 2 * kEach; ++c) {
        if (c >= kEach && !has_second) continue;
        const int channel = c < kEach ? mine.first * kEach + c : mine.second * kEach + c - kEach;
#pragma unroll
        for (int g = 0; g < kTrigHeads; ++g) {
          const float center = __ldg(centers[g] + channel);
#pragma unroll
          for (int u = 0; u < kKeys; ++u) sums[u][g] = fmaf(x[u][c], center, sums[u][g]);
        }
      }
      if (!turns) continue;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        float norm[kKeys];
#pragma unroll
        for (int u = 0; u < kKeys; ++u) {
          const float a = row.interleaved ? x[u][2 * i] : x[u][i],
                      c = row.interleaved ? x[u][2 * i + 1] : x[u][kEach + i];
          norm[u] = sqrtf(fmaf(a, a, c * c));
        }
#pragma unroll
        for (int g = 0; g < kTrigHeads; ++g) {
          const float weight = __ldg(p.norms.row(b, h * p.group + min(quad + g, p.group - 1)) + lane * kEach + i);
#pragma unroll
          for (int u = 0; u < kKeys; ++u) sums[u][g] = fmaf(norm[u], weight, sums[u][g]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      const int64_t slot = begin + u * groups;
      const bool there = first <= slot && slot < last;
#pragma unroll
      for (int g = 0; g < kTrigHeads; ++g) {
        for (int step = lanes / 2; step; step /= 2) sums[u][g] += __shfl_xor_sync(kWarp, sums[u][g], step);
        const float score = sums[u][g] * p.scale;
        if ((g & (lanes - 1)) == own && quad + g < p.group && slot < p.n)
          p.scores[((b * p.heads + h) * p.group + quad + g) * p.n + slot] =
              there && is_finite(score) ? score : CUDART_NAN_F;
      }
    }
  }
}

inline void trig_scores_cuda(const TrigScoresParams& p, cudaStream_t stream) {
  if (p.b * p.heads * p.group * p.n == 0) return;
  const uint64_t bits = address_bits(p.k, p.b, p.heads, p.n);
  with_read_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_pair_unit<T>(bits | static_cast<uint64_t>(p.pairs) * sizeof(T), [&](auto unit) {
      using Unit = decltype(unit);
      constexpr int kEach = kUnitElements<T, Unit>;
      const int lanes_log2 = shared_lanes_log2((p.d / kEach + 1) / 2);
      const int64_t step = (kTrigThreads >> lanes_log2) * kTrigKeys<T, Unit>, tiles = (p.n + step - 1) / step;
      with_pages<T>(p.k, [&](auto paged) {
        launch<trig_scores_kernel<T, Unit, paged>>(grid_of(p.b * p.heads * tiles), kTrigThreads, 0, stream, p,
                                                   lanes_log2, static_cast<unsigned>(tiles));
      });
    });
  });
}

}  // namespace
}  // namespace kvops
