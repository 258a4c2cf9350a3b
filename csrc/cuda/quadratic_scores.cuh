// The logarithm of the expected attention weight of each key, for queries of a Gaussian:
//
//   score_i = scale mean . k_i + scale^2 / 2 k_i^T C k_i = sum_c k_ic (scale mean_c + sum_{j <= c} U_cj k_ij)
//
// with U = scale^2 / 2 (C + C^T) below the diagonal of C, and half of that on it. The triangle saves 3/8 of the
// products at d = 128.
//
// Bytes that must move: K once, 4 bytes per query head and key. The [n, d] products of K and U are never written. With
// 32 query heads, 131,072 keys and d = 128 they are 86 GFLOP in fp32. The blocks of a group's query heads run at the
// same time, so that all but the first read the keys from L2.
//
// Keys are held as in window.cuh: in registers, and multiplied with 16 rows of U at a time from shared memory. 16-bit
// keys use the tensor cores, exactly enough for an exponent: a row of U is the sum of three bf16 parts for bf16 keys,
// or of two fp16 parts for fp16 keys, scaled to fp16's range by a power of two per row. fp32 keys are multiplied in
// fp32. A row of U that needs more than 128 fp32 or 256 16-bit channels is multiplied part by part, the key's own
// channels last, which then lie in registers.
//
// On the tensor cores, unlike in window.cuh, the rows of U are the rows of the product and 8 keys are its columns. Two
// words of a key, which lie side by side as they were loaded, are one operand. U is packed once per call, in the order
// of the other, so no registers are moved. The products of 16 rows with 8 keys then meet two transposed words of each
// of these keys. In fp32, rows of U are ordered such that the products a lane receives belong to channels whose keys it
// holds. For d = 128, 32 keys take 480 mma.sync and 960 other instructions (nvcc 13.0, sm_90a).
//
// A block holds one head's U in shared memory, chunk after chunk if it does not fit; the scores carry the sums from one
// chunk to the next. Grid: x runs over (batch, head, split, query head of the group); no result depends on the splits.
#pragma once
#include "../ops/quadratic_scores.h"
#include "async.cuh"
#include "reduce.cuh"
#include "window.cuh"

namespace kvops {
namespace {

// U leaves shared memory for one block per multiprocessor, whose warps must hide each other's latencies: as many as
// have enough registers.
template <class T, int kPieces>
constexpr int kQuadraticWarps = kHoldsRows<T, kPieces> ? 12 : 8;

// How U is stored for keys of T: the number of parts of each row, and the tiles of 16 rows per four pieces of a key.
template <class T>
constexpr int kUParts = sizeof(T) == 4            ? 1
                        : std::is_same_v<T, Half> ? 2
                                                  : 3;
template <class T>
constexpr int kUTiles = kPiece<T> / 4;

// The channel of a row of U.
template <class T>
__device__ inline int channel_of_row(int row) {
  const int tile = row / kTileRows, r = row % kTileRows, lane = r % 8 / 2;
  return tile / kUTiles<T> * 4 * kPiece<T> + kPiece<T> * lane + 4 * (tile % kUTiles<T>)+2 * (r / 8) + r % 2;
}

struct PackedU {
  int tiles;         // of 16 rows
  int row_bytes;     // a multiple of 64
  int pitch;         // fp32: bytes between rows in shared memory, 64 more than a multiple of 128, see window.cuh
  int chunk;         // tiles that a block holds at a time
  int64_t heads;     // Hq, or b * Hq
  int64_t per_head;  // bytes: [tiles, parts, 16, row_bytes]

  template <class T>
  static PackedU of(const QuadraticScoresParams& p) {
    PackedU x;
    const int64_t columns = (p.d + 4 * kPiece<T> - 1) / (4 * kPiece<T>);
    x.tiles = static_cast<int>(columns) * kUTiles<T>;
    x.row_bytes = static_cast<int>(64 * columns);
    x.pitch = sizeof(T) < 4 || x.row_bytes % 128 ? x.row_bytes : x.row_bytes + 64;
    // A tile of 16-bit keys of d > 992 takes 96 KiB, all that a block has on the smallest cards.
    const int tile_bytes = x.pitch * kTileRows * kUParts<T>, most = std::max((shared_memory() - 1024) / tile_bytes, 1);
    const int chunks = (x.tiles + most - 1) / most;  // of about equal size
    x.chunk = (x.tiles + chunks - 1) / chunks;
    x.heads = p.heads * p.group * (p.cov_stride_b || p.mean.stride_b ? p.b : 1);
    x.per_head = int64_t{x.tiles} * kUParts<T> * kTileRows * x.row_bytes;
    return x;
  }
};

// A row's factors: its products are multiplied by `unit`, then `mean` is added.
struct RowFactors {
  float unit, mean;
};

// Where a tile has element j of row `row`, in bytes: fp32 row by row; 16-bit numbers where the lanes of a warp find
// them as operand A of mma.cuh, [step, half, 32 lanes, 4 registers]. A step is 32 channels. A lane of c = l % 4
// multiplies words 2 half and 2 half + 1 of piece 4 step + c of a key.
template <class T>
__device__ inline int place_in_tile(int row, int j, int row_bytes) {
  if constexpr (sizeof(T) == 4) return row * row_bytes + 4 * j;
  const int step = j / 32, c = j % 32 / 8, word = j % 8 / 2, lane = row % 8 * 4 + c;
  return (((2 * step + word / 2) * 32 + lane) * 4 + word % 2 * 2 + row / 8) * 4 + j % 2 * 2;
}

struct QuadraticMemory {
  char* packed;         // [heads, tiles, parts, 16 * row_bytes]
  RowFactors* factors;  // [heads, tiles * 16]

  QuadraticMemory(const PackedU& u, Sections& sections)
      : packed(sections.add<char>(u.heads * u.per_head)),
        factors(sections.add<RowFactors>(u.heads * u.tiles * kTileRows)) {}
};

// One warp per row of U.
template <class T>
__global__ void __launch_bounds__(256)
    pack_quadratic_kernel(QuadraticScoresParams p, PackedU u, QuadraticMemory memory) {
  using E = Value<T>;
  const int64_t index = blockIdx.x * int64_t{8} + threadIdx.x / 32, rows = int64_t{u.tiles} * kTileRows;
  if (index >= u.heads * rows) return;
  const int64_t head = index / rows, query = head % (p.heads * p.group), b = head / (p.heads * p.group);
  const int row = static_cast<int>(index % rows), c = channel_of_row<T>(row), d = static_cast<int>(p.d);
  const int lane = threadIdx.x % 32;
  const float* const cov = p.cov + b * p.cov_stride_b + query * d * d;
  const double scale = p.scale, half = scale * scale / 2;
  const auto entry = [&](int j) {
    if (c >= d || j > c) return 0.0f;
    const double x = cov[static_cast<int64_t>(c) * d + j];
    return static_cast<float>(half * (j == c ? x : x + cov[static_cast<int64_t>(j) * d + c]));
  };
  float unit = 1.0f;
  if (std::is_same_v<T, Half>) {
    float largest = 0;
    for (int j = lane; j <= c; j += 32) largest = fmaxf(largest, fabsf(entry(j)));
    unit = half_unit(largest);
  }
  const float down = 1 / unit;
  char* const to = memory.packed + head * u.per_head + int64_t{row / kTileRows} * kUParts<T> * kTileRows * u.row_bytes;
  for (int j = lane; j < u.row_bytes / static_cast<int>(sizeof(E)); j += 32) {
    float rest = entry(j) * down;
#pragma unroll
    for (int part = 0; part < kUParts<T>; ++part) {
      const E rounded = from_float<E>(rest);
      *reinterpret_cast<E*>(to + part * kTileRows * u.row_bytes + place_in_tile<T>(row % kTileRows, j, u.row_bytes)) =
          rounded;
      rest -= to_float(rounded);
    }
  }
  if (lane == 0) memory.factors[index] = {unit, c < d ? static_cast<float>(scale * p.mean.row(b, query)[c]) : 0.0f};
}

// x[i][e]: adds the products of row l / 4 + 8 (e / 2) of a tile's part with part `of` of key 8 i + 2 (l % 4) + e % 2 of
// the warp, up to step `last`.
template <class T, int kPieces, int kBlocks>
__device__ inline void multiply_rows(float (&x)[2 * kBlocks][4], const KeyTile<T, kPieces, kBlocks>& keys,
                                     const char* tile, int last, int of) {
  const uint4* const operands = reinterpret_cast<const uint4*>(tile) + of * kPieces * 64 + threadIdx.x % 32;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (of * kPieces + p > last) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 a = operands[(2 * p + half) * 32];
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        const uint4 key = keys.raw[i][p];
        mma<Value<T>>(x[i], a.x, a.y, a.z, a.w, half ? key.z : key.x, half ? key.w : key.y);
      }
    }
  }
}

template <class T, int kPieces, bool kPaged>
__global__ void __launch_bounds__(32 * kQuadraticWarps<T, kPieces>, 1)
    quadratic_scores_kernel(QuadraticScoresParams p, PackedU u, QuadraticMemory memory, Splits splits, bool wide) {
  using Keys = KeyTile<T, kPieces>;
  constexpr int kOwn = Keys::kOwn, kBlocks = Keys::kBlocks, kParts = kUParts<T>, kWarps = kQuadraticWarps<T, kPieces>;
  constexpr bool kTensor = sizeof(T) < 4, kWhole = kHoldsRows<T, kPieces>;
  DYNAMIC_SHARED(char, held);  // [chunk, kParts, 16, pitch]
  const int64_t query = blockIdx.x % p.group, split = blockIdx.x / p.group % splits.count;
  const int64_t head = blockIdx.x / p.group / splits.count, b = head / p.heads, h = head % p.heads;
  const int begin = static_cast<int>(split * splits.keys), end = static_cast<int>(min(begin + splits.keys, p.n));
  const int first = static_cast<int>(p.slots.first(b)), last = first + static_cast<int>(p.slots.count(b));
  const int lane = threadIdx.x % 32, pieces = static_cast<int>(p.k.row_bytes / 16);
  const int parts = (pieces + 4 * kPieces - 1) / (4 * kPieces);
  const HeadRows rows = head_rows<kPaged, T>(p.k, b, h);
  float* const scores = p.scores + (head * p.group + query) * p.n;
  const int64_t packed = (head * p.group + query) % u.heads;
  const RowFactors* const factors = memory.factors + packed * u.tiles * kTileRows + (kTensor ? lane / 4 : lane % 4 * 2);

  for (int from = 0; from < u.tiles; from += u.chunk) {
    const int count = min(u.chunk, u.tiles - from), of_row = u.row_bytes / 16;
    __syncthreads();  // the previous chunk is done
    for (int i = threadIdx.x; i < count * kParts * kTileRows * of_row; i += 32 * kWarps)
      copy_async(
          reinterpret_cast<uint4*>(held + i / of_row * u.pitch) + i % of_row,
          memory.packed + packed * u.per_head + int64_t{from} * kParts * kTileRows * u.row_bytes + int64_t{16} * i);
    end_copies();
    wait_for_copies<0>();
    __syncthreads();  // the chunk is loaded

#pragma unroll 1
    for (int key = begin + threadIdx.x / 32 * Keys::kKeys; key < end; key += kWarps * Keys::kKeys) {
      const int left = min(end, last) - key;
      const HeadRows own = rows.from(key);
      Keys keys;
      if (kWhole || parts == 1) keys.load(own, left, pieces, 0, wide);
      // Of the tensor cores: sums[2 i + e] is of key 8 i + 2 (l % 4) + e; in fp32 sums[i] is of key l / 4 + 8 i.
      float sums[kTensor ? 2 * kOwn : kOwn] = {};
      const auto add_tile = [&](int tile) {
        const int step = tile / kUTiles<T>;
        const auto multiply_parts = [&](const auto& fn) {  // fn(part of U, part of the keys)
          for (int of = 0; of <= step / kPieces; ++of) {
            if (!kWhole && parts > 1) keys.load(own, left, pieces, of, wide);
#pragma unroll
            for (int i = 0; i < kParts; ++i) fn(held + ((tile - from) * kParts + i) * kTileRows * u.pitch, of);
          }
        };
        if constexpr (kTensor) {
          float x[kOwn][4] = {};
          multiply_parts([&](const char* rows, int of) { multiply_rows(x, keys, rows, step, of); });
          const RowFactors factor[2] = {factors[tile * kTileRows], factors[tile * kTileRows + 8]};
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            unsigned words[2] = {};  // that have this tile's channels of the lane's keys
#pragma unroll
            for (int at = 0; at < 2 * kPieces; ++at) {  // masks: an index or a branch would move the keys to memory
              const unsigned mask = at == tile % (2 * kPieces) ? ~0u : 0u;
              const uint4 piece = keys.raw[i][at / 2];
              words[0] |= (at % 2 ? piece.z : piece.x) & mask;
              words[1] |= (at % 2 ? piece.w : piece.y) & mask;
            }
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              const unsigned values = transpose_matrix(words[t]);  // of channel l / 4 and keys 2 (l % 4) + e
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float value = to_float(Value<T>{static_cast<uint16_t>(e ? values >> 16 : values & 0xffffu)});
                sums[2 * i + e] = fmaf(value, fmaf(x[i][2 * t + e], factor[t].unit, factor[t].mean), sums[2 * i + e]);
              }
            }
          }
        } else {
          Products<kBlocks> x = {};
          multiply_parts([&](const char* rows, int of) {
            multiply<T, kPieces>(x, keys, rows, u.pitch, min(pieces, 4 * (step + 1)), of);
          });
          // This lane's channels of the tile are piece `step` of its keys.
          RowFactors factor[2][2];
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 2; ++e) factor[t][e] = factors[tile * kTileRows + 8 * t + e];
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            uint4 piece{};
#pragma unroll
            for (int at = 0; at < kPieces; ++at) {
              const unsigned mask = at == step % kPieces ? ~0u : 0u;
              piece.x |= keys.raw[i][at].x & mask;
              piece.y |= keys.raw[i][at].y & mask;
              piece.z |= keys.raw[i][at].z & mask;
              piece.w |= keys.raw[i][at].w & mask;
            }
            float value[kPiece<T>];
            unpack<T>(piece, value);
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                sums[i] = fmaf(value[2 * t + e],
                               fmaf(x[i / 2][t][2 * (i % 2) + e], factor[t][e].unit, factor[t][e].mean), sums[i]);
          }
        }
      };
      if constexpr (kWhole) {
#pragma unroll
        for (int tile = 0; tile < kPieces * kUTiles<T>; ++tile)
          if (from <= tile && tile < from + count) add_tile(tile);
      } else {
#pragma unroll 1
        for (int tile = from; tile < from + count; ++tile) add_tile(tile);
      }
      float sum = 0;
      int of_warp;  // the key that this lane writes
      if constexpr (kTensor) {
        constexpr int kSame = 4 / kOwn;  // lanes that have the same sum
        sum = rows_sum<8, 4>(sums);
        of_warp = lane / 4 % kSame ? Keys::kKeys : lane / (8 * kSame) * 8 + lane % 4 * 2 + lane / (4 * kSame) % 2;
      } else {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float all = lanes_sum<4>(sums[i]);
          if (lane % 4 == i) sum = all;
        }
        of_warp = lane / 4 + lane % 4 * 8;
      }
      const int j = key + of_warp;
      if (of_warp < Keys::kKeys && j < end) {
        const float score = from ? scores[j] + sum : sum;
        scores[j] = first <= j && j < last && is_finite(score) ? score : CUDART_NAN_F;
      }
    }
  }
}

inline int64_t quadratic_scores_workspace(const QuadraticScoresParams& p) {
  int64_t bytes = 0;
  with_read_dtype(p.dtype, [&](auto type) { bytes = bytes_of<QuadraticMemory>(PackedU::of<decltype(type)>(p)); });
  return bytes;
}

inline void quadratic_scores_cuda(const QuadraticScoresParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads * p.group;
  if (heads * p.n == 0) return;
  const Splits splits = Splits::of(p.n, heads);
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.n);
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const PackedU u = PackedU::of<T>(p);
    Sections sections{workspace};
    const QuadraticMemory memory(u, sections);
    launch<pack_quadratic_kernel<T>>(grid_of((u.heads * u.tiles * kTileRows + 7) / 8), 256, 0, stream, p, u, memory);
    const auto score = [&](auto pieces) {
      with_pages<T>(p.k, [&](auto paged) {
        launch<quadratic_scores_kernel<T, decltype(pieces)::value, paged>>(
            grid_of(heads * splits.count), 32 * kQuadraticWarps<T, decltype(pieces)::value>,
            int64_t{u.chunk} * kUParts<T> * kTileRows * u.pitch, stream, p, u, memory, splits, wide);
      });
    };
    if constexpr (sizeof(T) < 4) {
      if (u.row_bytes <= 256) return score(Constant<4>{});
    }
    score(Constant<8>{});
  });
}

}  // namespace
}  // namespace kvops
