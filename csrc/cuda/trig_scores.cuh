// TriAttention scores.
//
//   score_i = sum_c center_c k_ic + sum_f norm_f |k_if|        |k_if|: the norm of the channels that RoPE rotates by f
//
// Bytes that must move: K once, 4 bytes per query head and key. Four query heads need 512 multiply-adds per key for the
// first sum (d = 128), 256 and 64 square roots for the second. There are two kernels:
//
//   16-bit keys whose pairs lie within a lane (trig_products_kernel): the first sum is a product of 16 keys with 16
//   rows
//     on the tensor cores, as in window.cuh. Each center is the sum of three 16-bit parts, which is as exact as fp32.
//     A row of the product is one part of one of four heads, and rows are ordered such that a lane gets the three parts
//     of one head for its keys and adds them itself. The same registers give the norms |k_if|. Their sum is a product,
//     too, of two tf32 parts of each norm with two of each weight: 22 bits of either. Weights lie in shared memory; a
//     block multiplies a long run of keys with them. A warp's next keys are on their way to shared memory meanwhile, 64
//     KiB per multiprocessor. With d = 128 and four heads, 4 KiB of bf16 keys take 510 instructions (nvcc 13.0,
//     sm_90a); a multiprocessor of an H200 can issue about 880 in the time the memory takes.
//   all others, fp32 among them (trig_scores_kernel): in fp32. A lane owns two units of a key that hold whole pairs
//     (rope.cuh), so it needs no other lane's data until the end, when the lanes of a key add their parts. A lane group
//     takes kTrigKeys keys at a time, so each center and norm, read through L1, serves that many keys. Four query heads
//     are multiplied at a time; the keys of a group with more are read again from L1 or L2. Lane groups take
//     neighbouring keys, so that a warp writes neighbouring scores. Grid: x runs over (batch, head, tile of keys).
//
// Which one runs depends on shapes alone, and so do the scores' bits.
#pragma once
#include "../ops/trig_scores.h"
#include "async.cuh"
#include "move.cuh"
#include "rope.cuh"
#include "window.cuh"

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

// ---- On the tensor cores ----

// Blocks per multiprocessor; code for sm_80 would spill registers with two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kTrigBlocks = 1;
#else
constexpr int kTrigBlocks = 2;
#endif

// The weights of `count` quads of query heads, in shared memory.
struct TrigWeights {
  int pitch;  // bytes between rows of centers: 64 more than a multiple of 128, see window.cuh
  int slots;  // norms that a lane has of a key
  int quads;  // of the group
  int held;   // at a time
  // Bytes of centers [16, pitch], row 8 t + 2 c + e: part 2 t + e of head c; norms [slots / 4, 32 lanes, 4], lane
  // 8 c + 4 e + (0 ... 3): part e of head c.
  int per_quad;

  // Two blocks' weights and `ring` bytes of each should fit in a multiprocessor.
  static TrigWeights of(const TrigScoresParams& p, int pieces, int ring) {
    TrigWeights x;
    const int width = static_cast<int>((p.d + 31) / 32 * 64);
    x.pitch = width % 128 ? width : width + 64;
    x.slots = p.pairs ? 4 * pieces : 0;
    x.quads = static_cast<int>((p.group + kTrigHeads - 1) / kTrigHeads);
    x.per_quad = kTileRows * x.pitch + x.slots * 128;
    x.held = std::min(x.quads, std::max((shared_memory() / 2 - 1024 - ring) / x.per_quad, 1));
    return x;
  }
};

// The frequency of norm `slot` of lane c of the four that share a key.
__device__ inline int frequency(int slot, int c, bool interleaved) {
  return interleaved ? 16 * (slot / 4) + 4 * c + slot % 4 : 32 * (slot / 8) + 8 * c + slot % 8;
}

// A power of two that scales a head's centers into fp16's range: the largest becomes less than 2^13. Called by a warp.
template <class T>
__device__ inline float center_unit(const float* centers, int d) {
  if constexpr (!std::is_same_v<T, Half>) return 1.0f;
  float largest = 0;
  for (int j = threadIdx.x % 32; j < d; j += 32) largest = fmaxf(largest, fabsf(__ldg(centers + j)));
  return half_unit(largest);
}

// Loads the weights of `count` quads from quad `first` on, one head per warp at a time; a barrier must follow.
template <class T>
__device__ inline void load_trig_weights(const TrigScoresParams& p, const TrigWeights& w, int64_t b, int64_t h,
                                         int first, int count, char* held, float* units) {
  using E = Value<T>;
  const int lane = threadIdx.x % 32, d = static_cast<int>(p.d);
  for (int i = threadIdx.x / 32; i < count * kTrigHeads; i += kTrigThreads / 32) {
    const int c = i % kTrigHeads, of_group = first * kTrigHeads + i;
    const int64_t head = h * p.group + min(int64_t{of_group}, p.group - 1);
    char* const to = held + i / kTrigHeads * w.per_quad;
    const float* const centers = p.centers.row(b, head);
    const float unit = center_unit<T>(centers, d), down = 1 / unit;
    for (int j = lane; j < (d + 31) / 32 * 32; j += 32) {
      float rest = j < d ? __ldg(centers + j) * down : 0.0f;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const E rounded = part < 3 ? from_float<E>(rest) : E{};
        reinterpret_cast<E*>(to + (8 * (part / 2) + 2 * c + part % 2) * w.pitch)[j] = rounded;
        rest -= to_float(rounded);
      }
    }
    float* const norms = reinterpret_cast<float*>(to + kTileRows * w.pitch);
    for (int j = lane; j < w.slots * 4; j += 32) {
      const int slot = j / 4, of_lane = 8 * c + j % 4, f = frequency(slot, j % 4, p.interleaved);
      const float weight = f < p.pairs ? __ldg(p.norms.row(b, head) + f) : 0.0f, upper = tf32_part(weight);
      norms[(slot / 4 * 32 + of_lane) * 4 + slot % 4] = upper;
      norms[(slot / 4 * 32 + of_lane + 4) * 4 + slot % 4] = weight - upper;
    }
    if (lane == 0) units[i] = unit;
  }
}

__device__ inline float pair_norm(float a, float b) {
  return sqrt_fast(fmaf(a, a, b * b));
}

// The norms of the pairs in a lane's pieces of a key. `half`: from a piece to that of its partners, if not interleaved.
template <class T, int kPieces>
__device__ inline void pair_norms(const uint4 (&raw)[kPieces], int pairs, bool interleaved,
                                  float (&norms)[4 * kPieces]) {
  const int c = threadIdx.x % 4, half = pairs / (4 * kPiece<T>);
  if (interleaved) {
#pragma unroll
    for (int at = 0; at < kPieces; ++at) {
      float x[kPiece<T>];
      unpack<T>(raw[at], x);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        norms[4 * at + e] = 16 * at + 4 * c < pairs ? pair_norm(x[2 * e], x[2 * e + 1]) : 0.0f;
    }
    return;
  }
  const auto with_partners = [&](auto step) {  // a constant, so that no register is indexed at run time
    constexpr int kStep = decltype(step)::value;
#pragma unroll
    for (int i = kPiece<T> * kStep; i < 4 * kPieces; ++i) norms[i] = 0.0f;
#pragma unroll
    for (int at = 0; at < kStep; ++at) {
      float x[kPiece<T>], y[kPiece<T>];
      unpack<T>(raw[at], x);
      unpack<T>(raw[at + kStep], y);
#pragma unroll
      for (int e = 0; e < kPiece<T>; ++e) norms[kPiece<T> * at + e] = pair_norm(x[e], y[e]);
    }
  };
  if (half == 1) return with_partners(Constant<1>{});
  if (kPieces == 4 || half == 2) return with_partners(Constant<2>{});
  with_partners(Constant<kPieces / 2>{});
}

// x[2 i + e]: the sum over pairs of key i's norms and part e of lane c's head's weights. `weights`: as TrigWeights has
// them.
template <int kSlots>
__device__ inline void multiply_norms(float (&x)[4], const float (&norms)[2][kSlots], const float* weights) {
  const float4* const own = reinterpret_cast<const float4*>(weights) + threadIdx.x % 32;
  float rest[4] = {};  // the products of the norms' second parts
#pragma unroll
  for (int at = 0; at < kSlots; at += 4) {
    const float4 weight = own[8 * at];
    float upper[2][4], lower[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        upper[i][e] = tf32_part(norms[i][at + e]);
        lower[i][e] = norms[i][at + e] - upper[i][e];
      }
    mma_tf32(x, upper[0][0], upper[1][0], upper[0][1], upper[1][1], weight.x, weight.y);
    mma_tf32(rest, lower[0][0], lower[1][0], lower[0][1], lower[1][1], weight.x, weight.y);
    mma_tf32(x, upper[0][2], upper[1][2], upper[0][3], upper[1][3], weight.z, weight.w);
    mma_tf32(rest, lower[0][2], lower[1][2], lower[0][3], lower[1][3], weight.z, weight.w);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] += rest[e];
}

// A warp's next 16 keys, on their way to shared memory while the warp multiplies those before. Each lane copies and
// takes its own pieces.
template <class T, int kPieces>
struct NextKeys {
  using Keys = KeyTile<T, kPieces, 1>;
  static constexpr int kBytes = Keys::kOwn * kPieces * kTrigThreads * 16;
  uint4* own;  // [kOwn, kPieces], kTrigThreads apart

  // Starts copying keys [0, left) of `rows`; the rest, and what a row of `pieces` pieces does not have, is 0.
  __device__ void fetch(const HeadRows& rows, int left, int pieces, bool wide) const {
    if (wide)
      fetch<true>(rows, left, pieces);
    else
      fetch<false>(rows, left, pieces);
    end_copies();
  }

  template <bool kWide>
  __device__ void fetch(const HeadRows& rows, int left, int pieces) const {
    const int lane = threadIdx.x % 32, key = lane / 4, own_pieces = pieces - lane % 4;
    HeadRows at = rows.from(key);
    at.data += lane % 4 * kPieceBytes<T>;
#pragma unroll
    for (int i = 0; i < Keys::kOwn; ++i) {
      const bool there = key + 8 * i < left;
      const char* const row = at.row(8 * i, there);
#pragma unroll
      for (int p = 0; p < kPieces; ++p)
        copy_piece<T, kWide>(own + (i * kPieces + p) * kTrigThreads, row + 4 * kPieceBytes<T> * p,
                             there && 4 * p < own_pieces);
    }
  }

  __device__ void take(Keys& keys) const {
    wait_for_copies<0>();
#pragma unroll
    for (int i = 0; i < Keys::kOwn; ++i)
#pragma unroll
      for (int p = 0; p < kPieces; ++p) keys.raw[i][p] = widen<T>(own[(i * kPieces + p) * kTrigThreads]);
  }
};

template <class T, int kPieces, bool kPaged>
__global__ void __launch_bounds__(kTrigThreads, kPieces == 4 ? kTrigBlocks : 1)
    trig_products_kernel(TrigScoresParams p, TrigWeights w, Splits splits, bool wide) {
  using Keys = KeyTile<T, kPieces, 1>;
  DYNAMIC_SHARED(char, held);
  float* const units = reinterpret_cast<float*>(held + w.held * w.per_quad);
  const NextKeys<T, kPieces> next = {reinterpret_cast<uint4*>(units + w.held * kTrigHeads) + threadIdx.x};
  const int64_t split = blockIdx.x % splits.count, head = blockIdx.x / splits.count, b = head / p.heads;
  const int64_t h = head % p.heads;
  const int begin = static_cast<int>(split * splits.keys), end = static_cast<int>(min(begin + splits.keys, p.n));
  const int first = static_cast<int>(p.slots.first(b)), last = first + static_cast<int>(p.slots.count(b));
  const int c = threadIdx.x % 4, pieces = static_cast<int>(p.d) / kPiece<T>;
  const HeadRows rows = head_rows<kPaged, T>(p.k, b, h);
  constexpr int kStep = kTrigThreads / 32 * Keys::kKeys;
  const int begin_of_warp = begin + static_cast<int>(threadIdx.x) / 32 * Keys::kKeys;
  const auto fetch = [&](int key) {
    if (key < end) next.fetch(rows.from(key), min(end, last) - key, pieces, wide);
  };

  for (int from = 0; from < w.quads; from += w.held) {
    const int count = min(w.held, w.quads - from);
    fetch(begin_of_warp);
    __syncthreads();  // the weights before these are no longer read
    load_trig_weights<T>(p, w, b, h, from, count, held, units);
    __syncthreads();
#pragma unroll 1
    for (int key = begin_of_warp; key < end; key += kStep) {
      Keys keys;
      next.take(keys);
      fetch(key + kStep);
      float norms[Keys::kOwn][4 * kPieces];
      if (w.slots)
#pragma unroll
        for (int i = 0; i < Keys::kOwn; ++i)
          pair_norms<T, kPieces>(keys.raw[i], static_cast<int>(p.pairs), p.interleaved, norms[i]);
#pragma unroll 1
      for (int quad = 0; quad < count; ++quad) {
        const char* const weights = held + quad * w.per_quad;
        Products<1> x = {};
        multiply<T, kPieces>(x, keys, weights, w.pitch, pieces, 0);
        float sums[2 * Keys::kOwn] = {};
        if (w.slots) multiply_norms(sums, norms, reinterpret_cast<const float*>(weights + kTileRows * w.pitch));
        const int of_group = (from + quad) * kTrigHeads + c;
        const float unit = units[quad * kTrigHeads + c];
#pragma unroll
        for (int i = 0; i < Keys::kOwn; ++i) {
          const float product = x[0][1][2 * i] + x[0][0][2 * i + 1] + x[0][0][2 * i];  // the smallest part first
          const float score = fmaf(product, unit, sums[2 * i + 1] + sums[2 * i]) * p.scale;
          const int slot = key + threadIdx.x % 32 / 4 + 8 * i;
          if (slot < end && of_group < p.group)
            p.scores[(head * p.group + of_group) * p.n + slot] =
                first <= slot && slot < last && is_finite(score) ? score : CUDART_NAN_F;
        }
      }
    }
  }
}

// Whether the pairs of these keys lie within one of the four lanes that share a key.
template <class T>
inline bool pairs_within_lanes(const TrigScoresParams& p) {
  if (p.d > 32 * kPiece<T>) return false;
  if (p.interleaved) return p.pairs % (kPiece<T> / 2) == 0;
  const int64_t half = p.pairs / (4 * kPiece<T>);
  return p.pairs % (4 * kPiece<T>) == 0 && (half & (half - 1)) == 0;
}

template <class T, int kPieces>
inline void trig_products(const TrigScoresParams& p, cudaStream_t stream) {
  constexpr int kRing = NextKeys<T, kPieces>::kBytes;
  const TrigWeights w = TrigWeights::of(p, kPieces, kRing);
  const Splits splits = Splits::of(p.n, p.b * p.heads);
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.n);
  with_pages<T>(p.k, [&](auto paged) {
    launch<trig_products_kernel<T, kPieces, paged>>(grid_of(p.b * p.heads * splits.count), kTrigThreads,
                                                    w.held * (w.per_quad + 4 * kTrigHeads) + kRing, stream, p, w,
                                                    splits, wide);
  });
}

inline void trig_scores_cuda(const TrigScoresParams& p, cudaStream_t stream) {
  if (p.b * p.heads * p.group * p.n == 0) return;
  const bool wide_rows = aligned_rows(p.k, p.b, p.heads, p.n);
  // A lane's pieces of weights begin at multiples of 16 bytes if the first one does.
  const bool wide = (reinterpret_cast<uintptr_t>(p.centers.data) | reinterpret_cast<uintptr_t>(p.norms.data)) % 16 == 0;
  with_read_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) < 4) {
      if (pairs_within_lanes<T>(p)) return p.d > 128 ? trig_products<T, 8>(p, stream) : trig_products<T, 4>(p, stream);
    }
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
