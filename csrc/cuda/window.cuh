// Products of a window's rows with keys: what window_scores, window_attention and drop_scores share.
//
// The G w query rows of one KV head are multiplied with blocks of its keys. In this product, keys are the tensor core's
// rows (its M) and queries its columns. A warp holds 16 or 32 keys in registers, loaded straight from global memory,
// and multiplies them with all rows, 16 at a time, from shared memory. So each key is read once for any number of rows,
// its sum over rows is added within four lanes, and warps do not wait for each other: the loop over keys has no
// barrier, and each warp loads its next keys while it works on the current ones.
//
// The order of a dot product's terms is free as long as both operands agree. A lane therefore loads whole 16-byte
// pieces (lane c of four loads pieces c, c + 4, ...) and passes their words to the tensor core as they are; ldmatrix is
// not needed. Rows of queries in shared memory have a pitch of 64 bytes more than a multiple of 128, so that the eight
// lanes that read together have no bank conflicts.
//
// fp32 is multiplied in fp32 in the same shapes: a lane multiplies its pieces of two keys with those of 16 rows, and
// the four lanes exchange partial sums until each has the four products that a tensor core would give it.
#pragma once
#include "../ops/window_scores.h"
#include "math.cuh"
#include "mma.cuh"
#include "row_sum.cuh"
#include "vec.cuh"

namespace kvops {
namespace {

constexpr int kWindowThreads = 256, kWindowWarps = kWindowThreads / 32;
constexpr int kTileRows = 16;  // rows that a warp multiplies at a time

// ---- Keys, in registers ----

// A warp's keys: lane l has, of keys l / 4 + 8 i, pieces l % 4 + 4 p. kPieces pieces of 16 bytes cover 64 kPieces bytes
// of a row; wider rows are processed in several parts.
template <class T, int kPieces, int Blocks = sizeof(T) < 4 && kPieces == 4 ? 2 : 1>
struct KeyTile {
  using Stored = T;
  static constexpr int kBlocks = Blocks;                          // of 16 keys; by default they take 64 registers
  static constexpr int kKeys = 16 * kBlocks, kOwn = 2 * kBlocks;  // keys per warp; keys a lane has pieces of
  // The next keys are loaded while these are multiplied. In fp32 one tile keeps a warp busy for longer than a load
  // takes, so the scheduler's other warp hides the latency, and the registers hold sums instead.
  static constexpr bool kAhead = sizeof(T) < 4;
  uint4 raw[kOwn][kPieces];

  // Loads keys [0, left) of `rows`, limited to this part of a row of `pieces` pieces; the rest is 0.
  __device__ void load(const HeadRows& rows, int left, int pieces, int part, bool wide) {
    if (wide)
      load<true>(rows, left, pieces, part);
    else
      load<false>(rows, left, pieces, part);
  }

  template <bool kWide>
  __device__ void load(const HeadRows& rows, int left, int pieces, int part) {
    const int key = threadIdx.x % 32 / 4, own = pieces - part * 4 * kPieces - static_cast<int>(threadIdx.x % 4);
    HeadRows at = rows.from(key);
    at.data += (part * 4 * kPieces + threadIdx.x % 4) * kPieceBytes<T>;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool there = key + 8 * i < left;
      const char* const row = at.row(8 * i, there);
#pragma unroll
      for (int p = 0; p < kPieces; ++p)
        raw[i][p] = there && 4 * p < own ? load_piece<T, kWide>(row + 4 * kPieceBytes<T> * p) : uint4{};
    }
  }
};

// x[m][t][e]: a lane's products with 16 rows, in the layout of the tensor cores: block m of 16 keys, half t of the
// rows; key l / 4 + 8 (e / 2), row 2 (l % 4) + e % 2.
template <int kBlocks>
using Products = float[kBlocks][2][4];

// Adds the products of one part of the keys with the same part of 16 rows. `queries`: the first row, in shared memory.
template <class T, int kPieces, int kBlocks>
__device__ inline void multiply(Products<kBlocks>& x, const KeyTile<T, kPieces, kBlocks>& keys, const char* queries,
                                int pitch, int pieces, int part) {
  const int lane = threadIdx.x % 32;
  queries += part * 64 * kPieces + lane % 4 * 16;
  pieces -= part * 4 * kPieces;
  if constexpr (sizeof(T) < 4) {
    queries += lane / 4 * pitch;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (4 * p >= pieces) break;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const uint4 q = *reinterpret_cast<const uint4*>(queries + 8 * t * pitch + 64 * p);
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          const uint4 a = keys.raw[2 * m][p], b = keys.raw[2 * m + 1][p];
          mma<Value<T>>(x[m][t], a.x, b.x, a.y, b.y, q.x, q.y);
          mma<Value<T>>(x[m][t], a.z, b.z, a.w, b.w, q.z, q.w);
        }
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float sums[2][8] = {};  // over this lane's pieces: [key][row]
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (4 * p >= pieces) break;
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          const float4 q = *reinterpret_cast<const float4*>(queries + (8 * t + r) * pitch + 64 * p);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 k = keys.raw[i][p];
            sums[i][r] = fmaf(__uint_as_float(k.x), q.x, sums[i][r]);
            sums[i][r] = fmaf(__uint_as_float(k.y), q.y, sums[i][r]);
            sums[i][r] = fmaf(__uint_as_float(k.z), q.z, sums[i][r]);
            sums[i][r] = fmaf(__uint_as_float(k.w), q.w, sums[i][r]);
          }
        }
      }
      // Of the 8 rows, the upper two of the four lanes take the upper half; then the odd lanes take the upper half of
      // that.
      const bool upper = lane & 2, odd = lane & 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* const s = sums[i];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float mine = upper ? s[4 + r] : s[r], other = upper ? s[r] : s[4 + r];
          s[r] = mine + __shfl_xor_sync(kWarp, other, 2);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float mine = odd ? s[2 + r] : s[r], other = odd ? s[r] : s[2 + r];
          x[0][t][2 * i + r] += mine + __shfl_xor_sync(kWarp, other, 1);
        }
      }
    }
  }
}

// ---- Logits ----

// The logit of a product, times `unit` (1 or log2(e)); rounded (kLargeLogit).
__device__ inline float logit_of(const Window& p, float product, float unit) {
  if (p.softcap == 0.0f) return __fmul_rn(product, p.scale * unit);
  return p.softcap * unit * tanhf(product * p.scale / p.softcap);
}

// The value of a key of one head, `head` = b * p.heads + h, in one of the tensors that have one per key; 0 if the key
// is not `there`. The address is computed from `head`, which the kernels need anyway: this takes few registers.
template <bool kPaged>
__device__ inline float key_value(const KVView& of, const Window& p, int64_t head, int key, bool there) {
  if (!there) return 0.0f;
  const unsigned unit = static_cast<unsigned>(head), heads = static_cast<unsigned>(p.heads);
  const unsigned b = unit / heads, h = unit % heads;
  return *reinterpret_cast<const float*>(kPaged ? of.head(b, h).row(key) : of.row(b, h, key));
}

// Calls fn(x, value of its key) for a lane's products with up to 32 keys, whose values the lanes hold: `mine` is that
// of key `lane`. The lanes exchange them.
template <int kBlocks, int kHalves, class Fn>
__device__ inline void for_key_values(float (&x)[kBlocks][kHalves][4], float mine, const Fn& fn) {
  static_assert(kBlocks <= 2);
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_key = __shfl_sync(kWarp, mine, 16 * m + 8 * half + threadIdx.x % 32 / 4);
#pragma unroll
      for (int t = 0; t < kHalves; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) fn(x[m][t][2 * half + i], of_key);
    }
}

// The scales and biases of one head's keys. Biases, in units of products (key_bias / scale), are what products begin
// with, so what follows is the same with and without them. Products with int8 keys are scaled first.
template <class T, bool kPaged>
struct KeyTerms {
  static constexpr bool kScaled = std::is_same_v<T, Int8>;
  const Window& p;
  int64_t head;  // b * p.heads + h

  // Of keys key + [0, left), before the products and after them.
  template <int kBlocks, int kHalves>
  __device__ void begin(float (&x)[kBlocks][kHalves][4], int key, int left) const {
    if constexpr (!kScaled)
      if (p.key_bias.data) for_key_values(x, bias(key, left), [](float& x, float bias) { x = bias; });
  }
  template <int kBlocks, int kHalves>
  __device__ void end(float (&x)[kBlocks][kHalves][4], int key, int left) const {
    if constexpr (kScaled) {
      const int lane = threadIdx.x % 32;
      float scale = key_value<kPaged>(p.k_scale, p, head, key + lane, lane < left);
      scale = fmaf(scale, 0.0f, scale);  // NaN if it is not finite, which a softcap would hide
      for_key_values(x, scale, [](float& x, float scale) { x *= scale; });
      if (p.key_bias.data) for_key_values(x, bias(key, left), [](float& x, float bias) { x += bias; });
    }
  }

  // Multiplies softmax weights, in the layout of the products, by the scales of the values.
  template <int kBlocks, int kHalves>
  __device__ void weigh(float (&x)[kBlocks][kHalves][4], int key, int left) const {
    if constexpr (kScaled) {
      const int lane = threadIdx.x % 32;
      const float scale = value_scale(key + lane, lane < left);
      for_key_values(x, scale, [](float& weight, float scale) { weight *= scale; });
    }
  }
  __device__ float value_scale(int key, bool there) const { return key_value<kPaged>(p.v_scale, p, head, key, there); }

 private:
  __device__ float bias(int key, int left) const {
    const int lane = threadIdx.x % 32;
    return __fdividef(key_value<kPaged>(p.key_bias, p, head, key + lane, lane < left), p.scale);
  }
};

struct NoTerms {
  template <class Products>
  __device__ void begin(Products&, int, int) const {}
  template <class Products>
  __device__ void end(Products&, int, int) const {}
  template <class Products>
  __device__ void weigh(Products&, int, int) const {}
};

// ---- Queries, in shared memory ----

// The rows of one KV head, as tiles use them: `units` runs of `size` rows whose scores are reduced together, each
// padded to a multiple of 8. A unit is either all G w rows, or the w rows of one query head.
struct RowLayout {
  int units, size, padded;
  int rows;  // over all units, padded to a multiple of 16

  static RowLayout of(int64_t units, int64_t size) {
    const int padded = static_cast<int>((size + 7) / 8 * 8);
    return {static_cast<int>(units), static_cast<int>(size), padded,
            static_cast<int>((units * padded + kTileRows - 1) / kTileRows * kTileRows)};
  }

  // The row at this position, g * w + i, or -1 for padding.
  KVOPS_HOST_DEVICE int at(int row) const {
    const int unit = row / padded, i = row - unit * padded;
    return unit < units && i < size ? unit * size + i : -1;
  }
};

// Bytes from one row of queries to the next.
inline int query_pitch(int64_t row_bytes) {
  const int width = static_cast<int>((row_bytes + 63) / 64 * 64);
  return width % 128 ? width : width + 64;
}

// Whether rows of queries can be read in whole pieces.
inline bool aligned_queries(const Window& p) {
  const QueryView& q = p.q;
  const int64_t item = p.k.row_bytes / p.d;
  return q.stride_d == item && (reinterpret_cast<uintptr_t>(q.data) | static_cast<uint64_t>(p.b > 1 ? q.stride_b : 0) |
                                static_cast<uint64_t>(p.heads * p.group > 1 ? q.stride_h : 0) |
                                static_cast<uint64_t>(p.w > 1 ? q.stride_w : 0)) %
                                       16 ==
                                   0;
}

// A piece of row g * w + i of a KV head's queries; 0 past its end.
template <class T>
__device__ inline uint4 query_piece(const Window& p, int64_t b, int64_t h, int row, int piece, bool wide) {
  const int w = static_cast<int>(p.w), at = piece * kPiece<T>;
  if (at >= p.d) return uint4{};
  const char* const from = p.q.row(b, h * p.group + row / w, row % w) + at * p.q.stride_d;
  if (wide) return __ldg(reinterpret_cast<const uint4*>(from));
  uint4 x;
#pragma unroll
  for (int e = 0; e < kPiece<T>; ++e)
    reinterpret_cast<Value<T>*>(&x)[e] = *reinterpret_cast<const Value<T>*>(from + e * p.q.stride_d);
  return x;
}

// Copies rows first + [0, count) of `layout` to shared memory: the queries (0 for padding, and past the end of each
// row), and the rows' limits (0 for padding). Called by the whole block; a barrier must follow.
template <class T>
__device__ inline void load_queries(const Window& p, const RowLayout& layout, int64_t b, int64_t h, int first,
                                    int count, char* queries, int pitch, int* limits, bool wide) {
  const int pieces = (static_cast<int>(p.k.row_bytes) + 63) / 64 * 4;
  for (int i = threadIdx.x; i < count * pieces; i += blockDim.x) {
    const int row = layout.at(first + i / pieces), piece = i % pieces;
    reinterpret_cast<uint4*>(queries + i / pieces * pitch)[piece] =
        row < 0 ? uint4{} : query_piece<T>(p, b, h, row, piece, wide);
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int row = layout.at(first + i);
    limits[i] = row < 0 ? 0 : static_cast<int>(p.limit(b, row % static_cast<int>(p.w)));
  }
}

// The smallest and largest limit of a set of rows.
struct Limits {
  int least, most;
};

// Computes the limits of each tile of 16 rows, out of `count`. If `factors` is given and one of a tile's factors is
// negative, its `least` becomes 0, so that the tile takes the careful path. Needs a barrier before and after.
__device__ inline void limits_of_tiles(const int* limits, int count, Limits* tiles, const float* factors = nullptr) {
  for (int tile = threadIdx.x; tile < count / kTileRows; tile += blockDim.x) {
    Limits x{limits[tile * kTileRows], limits[tile * kTileRows]};
    for (int i = 1; i < kTileRows; ++i) {
      x.least = min(x.least, limits[tile * kTileRows + i]);
      x.most = max(x.most, limits[tile * kTileRows + i]);
    }
    for (int i = 0; factors && i < kTileRows; ++i)
      if (factors[tile * kTileRows + i] < 0.0f) x.least = 0;
    tiles[tile] = x;
  }
}

// One past the last key that any row sees, and the number of rows that see any key. Called by the whole block; every
// thread gets both.
struct Counted {
  int most, rows;
};
__device__ inline Counted count_rows(const Window& p, int64_t b) {
  __shared__ int most[kWindowWarps], rows[kWindowWarps];
  const int warp = threadIdx.x / 32;
  const int limit = threadIdx.x < p.w ? static_cast<int>(p.limit(b, threadIdx.x)) : 0;
  const int most_here = __reduce_max_sync(kWarp, limit);
  const int rows_here = __popc(__ballot_sync(kWarp, limit > p.first(b)));
  if (threadIdx.x % 32 == 0) {
    most[warp] = most_here;
    rows[warp] = rows_here;
  }
  __syncthreads();
  Counted x{0, 0};
  for (int i = 0; i < kWindowWarps; ++i) {
    x.most = max(x.most, most[i]);
    x.rows += rows[i];
  }
  return x;
}
static_assert(kWindowThreads >= kMaxWindow);

// ---- Keys, cut into splits ----

// A block takes the `split`-th run of `keys` keys of one head.
struct Splits {
  int64_t keys;
  unsigned count;

  // For results that do not depend on the splits: enough splits that those of `heads` heads fill the GPU about twice.
  static Splits of(int64_t n, int64_t heads) {
    return about(n, int64_t{multiprocessors()} * 2 / (heads > 0 ? heads : 1));
  }

  // For sums over keys, which do depend on the splits: the same number for every GPU, batch and number of heads. With 8
  // heads, 148 splits are 1184 blocks: 10.96 per multiprocessor on an A100 (108), 8.97 on an H200 (132), 8 on a B200
  // (148), so the last round is nearly full on all of them. Rows that take several blocks get fewer splits.
  // tests/cuda/test_window_plans.py measures the cost.
  static Splits fixed(int64_t n, int64_t row_blocks) { return about(n, 148 / row_blocks); }

 private:
  // The wanted number of splits or slightly fewer, with at least 64 keys for each of 8 warps.
  static Splits about(int64_t n, int64_t wanted) {
    constexpr int64_t step = 32 * kWindowWarps;
    int64_t keys = wanted > 1 ? (n + wanted - 1) / wanted : n;
    keys = (keys + step - 1) / step * step;
    if (keys < 2 * step) keys = 2 * step;
    return {keys, static_cast<unsigned>(n > keys ? (n + keys - 1) / keys : 1)};
  }
};

// A power of two that scales numbers into fp16's range: the largest magnitude that the lanes of a warp pass becomes
// less than 2^13.
__device__ inline float half_unit(float largest) {
#pragma unroll
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, step));
  int exponent = 0;
  if (0 < largest && largest < CUDART_INF_F) frexpf(largest, &exponent);
  return ldexpf(1.0f, max(exponent, -100) - 13);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};
// Calls fn(Constant<pieces>{}) for the pieces of a row of T that a warp holds at a time.
template <class T, class Fn>
inline void with_pieces(int64_t row_bytes, const Fn& fn) {
  if constexpr (sizeof(T) < 4) {
    if (row_bytes <= 256) return fn(Constant<4>{});
  }
  fn(Constant<8>{});
}

// Whether with_pieces() chooses this many only for rows that fit in them.
template <class T, int kPieces>
constexpr bool kHoldsRows = sizeof(T) < 4 && kPieces == 4;

// Calls fn(T{}, Constant<pieces>{}) for the stored dtype and the width of the keys.
template <class Fn>
inline void with_key_tile(const Window& p, const Fn& fn) {
  with_scaled_dtype(
      p.stored, [&](auto type) { with_pieces<decltype(type)>(p.k.row_bytes, [&](auto pieces) { fn(type, pieces); }); });
}

// The products of a warp's keys with 16 rows, with the terms of keys key + [0, left): from registers if the keys fit,
// otherwise part by part from global memory. Tensor cores round sums toward zero; kApart adds those of the parts
// outside of them. kWhole: the keys fit in any case. Without the loop over parts, the compiler keeps them in the order
// that tensor cores need.
template <class T, int kPieces, bool kWhole = false, bool kApart = false, int kBlocks, class Terms = NoTerms>
__device__ inline void multiply_all(Products<kBlocks>& x, KeyTile<T, kPieces, kBlocks>& keys, int64_t row_bytes,
                                    const HeadRows& rows, int left, bool wide, const char* queries, int pitch,
                                    const Terms& terms = {}, int key = 0) {
#pragma unroll
  for (int m = 0; m < kBlocks; ++m)
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][t][e] = 0.0f;
  terms.begin(x, key, left);
  const int pieces = static_cast<int>(row_bytes) / 16;
  if constexpr (kWhole) {
    multiply(x, keys, queries, pitch, pieces, 0);
  } else if (pieces <= 4 * kPieces) {
    multiply(x, keys, queries, pitch, pieces, 0);
  } else {
    for (int part = 0; part * 4 * kPieces < pieces; ++part) {
      keys.load(rows, left, pieces, part, wide);
      if constexpr (kApart) {
        Products<kBlocks> y = {};
        multiply(y, keys, queries, pitch, pieces, part);
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][t][e] += y[m][t][e];
      } else {
        multiply(x, keys, queries, pitch, pieces, part);
      }
    }
  }
  terms.end(x, key, left);
}

}  // namespace
}  // namespace kvops
