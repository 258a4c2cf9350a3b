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

// How lanes read keys: in pieces (kPiece elements, 16 bytes or 8 of fp8), one access each if rows are aligned, or, if
// half a rotated row is not whole pieces, element by element. What a lane owns, and so the order of its sums, does not
// depend on addresses.
enum class TrigRead { wide, narrow, single };
template <class T, TrigRead kRead>
constexpr int kTrigElements = kRead == TrigRead::single ? 1 : kPiece<T>;
constexpr int kTrigKeys = 4;  // that a lane group takes at a time: up to 64 elements per lane

// Elements [unit * kEach, ...) of a row; 0 if it is not `there`.
template <class T, TrigRead kRead, int kEach>
__device__ inline void load_unit(const char* row, int unit, bool there, float (&x)[kEach]) {
  if constexpr (kRead == TrigRead::single) {
    x[0] = there ? to_float(reinterpret_cast<const T*>(row)[unit]) : 0.0f;
  } else {
    unpack<T>(there ? load_piece<T, kRead == TrigRead::wide>(row + kPieceBytes<T> * unit) : uint4{}, x);
  }
}

// N weights, in pieces of 16 bytes if they are aligned.
template <int N>
__device__ inline void load_weights(const float* from, bool wide, float (&x)[N]) {
  if (N % 4 == 0 && wide) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float4 piece = __ldg(reinterpret_cast<const float4*>(from) + i);
      x[4 * i] = piece.x;
      x[4 * i + 1] = piece.y;
      x[4 * i + 2] = piece.z;
      x[4 * i + 3] = piece.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = __ldg(from + i);
  }
}

template <class T, TrigRead kRead, bool kPaged>
__global__ void __launch_bounds__(kTrigThreads, 1)
    trig_scores_kernel(TrigScoresParams p, int lanes_log2, unsigned tiles, bool wide) {
  constexpr int kEach = kTrigElements<T, kRead>, kKeys = kTrigKeys;
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
      float x[kKeys][2][kEach];
#pragma unroll
      for (int u = 0; u < kKeys; ++u) {
        const int64_t slot = begin + u * groups;
        const bool there = first <= slot && slot < last;
        const char* const from = rows.row(slot, there);
        load_unit<T, kRead>(from, mine.first, there, x[u][0]);
        load_unit<T, kRead>(from, mine.second, there && has_second, x[u][1]);
      }
#pragma unroll
      for (int g = 0; g < kTrigHeads; ++g) {
        const float* const centers = p.centers.row(b, h * p.group + min(quad + g, p.group - 1));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (half && !has_second) continue;
          float center[kEach];
          load_weights(centers + (half ? mine.second : mine.first) * kEach, wide, center);
#pragma unroll
          for (int c = 0; c < kEach; ++c)
#pragma unroll
            for (int u = 0; u < kKeys; ++u) sums[u][g] = fmaf(x[u][half][c], center[c], sums[u][g]);
        }
      }
      if (!turns) continue;
      // The norms replace elements that are no longer needed.
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int u = 0; u < kKeys; ++u) {
          const float a = row.interleaved ? x[u][2 * i / kEach][2 * i % kEach] : x[u][0][i];
          const float c = row.interleaved ? x[u][(2 * i + 1) / kEach][(2 * i + 1) % kEach] : x[u][1][i];
          x[u][0][i] = sqrtf(fmaf(a, a, c * c));
        }
#pragma unroll
      for (int g = 0; g < kTrigHeads; ++g) {
        float weight[kEach];
        load_weights(p.norms.row(b, h * p.group + min(quad + g, p.group - 1)) + lane * kEach, wide, weight);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
          for (int u = 0; u < kKeys; ++u) sums[u][g] = fmaf(x[u][0][i], weight[i], sums[u][g]);
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
  const bool wide_rows = aligned_rows(p.k, p.b, p.heads, p.n);
  // A lane's pieces of weights begin at multiples of 16 bytes if the first one does.
  const bool wide = (reinterpret_cast<uintptr_t>(p.centers.data) | reinterpret_cast<uintptr_t>(p.norms.data)) % 16 == 0;
  with_read_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto score = [&](auto read) {
      constexpr TrigRead kRead = decltype(read)::value;
      const int lanes_log2 = shared_lanes_log2((p.d / kTrigElements<T, kRead> + 1) / 2);
      const int64_t step = int64_t{kTrigThreads >> lanes_log2} * kTrigKeys, tiles = (p.n + step - 1) / step;
      with_pages<T>(p.k, [&](auto paged) {
        launch<trig_scores_kernel<T, kRead, paged>>(grid_of(p.b * p.heads * tiles), kTrigThreads, 0, stream, p,
                                                    lanes_log2, static_cast<unsigned>(tiles), wide);
      });
    };
    if (p.pairs % kPiece<T>) return score(std::integral_constant<TrigRead, TrigRead::single>{});
    if (wide_rows) return score(std::integral_constant<TrigRead, TrigRead::wide>{});
    score(std::integral_constant<TrigRead, TrigRead::narrow>{});
  });
}

}  // namespace
}  // namespace kvops
