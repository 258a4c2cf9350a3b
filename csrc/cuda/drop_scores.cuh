// DropKV scores: how far the outputs of the last queries move if a key is dropped.
//
//   a[i, j]  = exp(logit[i, j] - lse[i])                 o_i = sum over j of a[i, j] v_j
//   score[j] = reduce over rows i of (a / (1 - a + epsilon))^2 |v_j - o_i|^2
//   |v - o|^2 = |v|^2 - 2 v . o + |o|^2
//
// Bytes that must move: K and V twice. window_attention's kernels first compute the rows' totals and their outputs in
// fp32. Where weights are rounded to 16 bits for the tensor cores, the totals are sums of the rounded weights: v - o is
// then a mean of differences v - v', whose relative error is that of the weights, even where one key has nearly all of
// the weight.
//
// drop_scores then multiplies keys with queries and values with outputs, as window.cuh explains: a warp holds 16 keys
// and their values in registers, and multiplies them with 16 rows at a time from shared memory. Both products have the
// same layout, so a lane combines its own numbers, and the sum over rows is added within four lanes at the end.
//
// Tensor cores take 16-bit operands, and an output rounded to 16 bits would be too far off: where values are alike,
// |v - o|^2 is a small difference of large numbers. So an output is two rows, its rounded value and what rounding left,
// and values take two products. Of bf16 outputs 2^-18 is lost, far less than rounding has taken from bf16 values. For
// fp16 a power of two scales both rows into range. Where one key has a large weight (kLargeWeight), the lane subtracts
// channel by channel instead; a row has fewer than four such keys.
//
// A tile of 16 keys and 16 rows costs a warp (bf16, d = 128): 48 tensor-core products of 16 x 8 x 16, and for each of
// the lane's 8 logits one exponential, one reciprocal and about ten other operations.
//
// drop_rows writes the rows as the tiles take them, once for all blocks. If 16 of them do not fit in shared memory
// (head dims of k and v around 1000, on a GPU with 99 KB), they are read from where it has written them.
//
// Grid: x runs over (batch, KV head, unit, split). A unit is the rows that are summed: all rows of a KV head, or those
// of one query head if the group is reduced by its maximum, or not at all. In those cases the heads of a group read
// their keys one after the other, mostly from L2, and drop_group_max takes the maximum. Rows that do not fit in shared
// memory together are processed in chunks; what a chunk leaves unfinished waits in `scores` for the same thread.
#pragma once
#include "../ops/drop_scores.h"
#include "reduce.cuh"
#include "window.cuh"
#include "window_passes.h"

namespace kvops {
namespace {

constexpr int64_t kDropShared = 160 * 1024;  // bytes per block at most: the rest of the memory is left to L1

// How a call is divided.
struct DropPlan {
  int units, size;              // per KV head; rows per unit
  int chunks, rows;             // per unit; per chunk, a multiple of 16
  int pitch, out_pitch, parts;  // bytes from one row of queries, or of outputs, to the next; rows per output
  bool wide, wide_queries;      // whether keys and values, or queries, can be read in whole pieces
  bool fits;                    // whether shared memory holds 16 rows
  int64_t bytes;                // per chunk
  Splits splits;

  static DropPlan of(const DropScoresParams& p) {
    const Window& w = p.window;
    const bool together = w.group_reduce == Reduce::sum || w.group_reduce == Reduce::mean;
    DropPlan x = {};
    x.units = together ? 1 : static_cast<int>(w.group);
    x.size = static_cast<int>(together ? w.group * w.w : w.w);
    x.pitch = query_pitch(w.k.row_bytes);
    x.out_pitch = query_pitch(p.v.row_bytes);
    x.parts = w.dtype == DType::f32 ? 1 : 2;
    const int per_tile = kTileRows * (x.pitch + x.parts * x.out_pitch + kNumbers) + static_cast<int>(sizeof(Limits));
    const int64_t memory = shared_memory() < kDropShared ? shared_memory() : kDropShared;
    const int most = static_cast<int>((memory - 1024) / per_tile), tiles = (x.size + kTileRows - 1) / kTileRows;
    x.fits = most > 0;
    x.chunks = x.fits ? (tiles + most - 1) / most : 1;
    const int each = (tiles + x.chunks - 1) / x.chunks;
    x.rows = each * kTileRows;
    x.bytes = (int64_t{each} * per_tile + 15) / 16 * 16;
    x.wide = aligned_rows(w.k, w.b, w.heads, w.n) && aligned_rows(p.v, w.b, w.heads, w.n);
    x.wide_queries = aligned_queries(w);
    x.splits = Splits::of(w.n, w.b * w.heads * x.units);
    return x;
  }

  int64_t all_chunks(const Window& w) const { return w.b * w.heads * units * chunks; }

  static constexpr int kNumbers = 4 * sizeof(float) + sizeof(int);  // bytes per row: DropNumbers and a limit
};

// What a row of queries and outputs is used with.
struct DropNumbers {
  float less, factor;  // its RowWeight
  float square;        // |o|^2
  float scale;         // what products with the output are multiplied by
};

// A chunk's rows.
struct DropRows {
  char *queries, *outs;  // [rows, pitch], [parts, rows, out_pitch]
  DropNumbers* numbers;  // [rows]
  int* limits;           // [rows]
  Limits* tiles;         // [rows / 16]

  __device__ DropRows(char* memory, const DropPlan& plan) {
    queries = memory;
    outs = queries + plan.rows * plan.pitch;
    numbers = reinterpret_cast<DropNumbers*>(outs + plan.parts * plan.rows * plan.out_pitch);
    limits = reinterpret_cast<int*>(numbers + plan.rows);
    tiles = reinterpret_cast<Limits*>(limits + plan.rows);
  }
};

// A row's output, in 16-bit types as two rows, with its scale and squared norm. Called by a warp; `out` is null past
// the last row.
template <class T>
__device__ inline void write_output(const DropRows& rows, const DropPlan& plan, int i, const float* out, int dv) {
  const int lane = threadIdx.x % 32;
  float largest = 0.0f, square = 0.0f;
  for (int c = lane; out && c < dv; c += 32) {
    largest = fmaxf(largest, fabsf(out[c]));
    square = fmaf(out[c], out[c], square);
  }
  const float scale = std::is_same_v<Value<T>, Half> ? half_unit(largest) : 1.0f;
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));  // of a power of two
  square = lanes_sum<32>(square);
  if (lane == 0) {
    rows.numbers[i].square = square;
    rows.numbers[i].scale = scale;
  }
  for (int piece = lane; piece < plan.out_pitch / 16; piece += 32) {
    float x[kPiece<T>], left[kPiece<T>];
#pragma unroll
    for (int e = 0; e < kPiece<T>; ++e) {
      const int c = piece * kPiece<T> + e;
      x[e] = out && c < dv ? out[c] * inverse : 0.0f;
      left[e] = x[e] - to_float(from_float<Value<T>>(x[e]));
    }
    char* const to = rows.outs + i * plan.out_pitch + 16 * piece;
    *reinterpret_cast<uint4*>(to) = pack<T>(x);
    if constexpr (sizeof(T) < 4) *reinterpret_cast<uint4*>(to + plan.rows * plan.out_pitch) = pack<T>(left);
  }
}

// Adds the squares of this part of a lane's values, over the four lanes that share them.
template <class T, int kPieces>
__device__ inline void add_squares(float (&sums)[2], const KeyTile<T, kPieces, 1>& values) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float x[kPiece<T>];
      unpack<T>(values.raw[i][piece], x);
#pragma unroll
      for (int e = 0; e < kPiece<T>; ++e) sum = fmaf(x[e], x[e], sum);
    }
    sums[i] += lanes_sum<4>(sum);
  }
}

// Writes the rows of each chunk as drop_scores uses them. A block per 16 rows of a chunk, a warp per row.
template <class T>
__global__ void __launch_bounds__(kWindowThreads)
    drop_rows_kernel(DropScoresParams params, DropPlan plan, const float* outs, const RowSum* totals, char* chunks) {
  const Window& p = params.window;
  const int tiles = plan.rows / kTileRows, tile = blockIdx.x % tiles;
  const int64_t chunk = blockIdx.x / tiles, unit = chunk / plan.chunks;
  const int64_t head = unit / plan.units, b = head / p.heads, h = head % p.heads;
  const DropRows rows(chunks + chunk * plan.bytes, plan);
  const int first = static_cast<int>(chunk % plan.chunks) * plan.rows;
  const int first_row = static_cast<int>(unit % plan.units) * plan.size;  // of the KV head's G w rows
  const int lane = threadIdx.x % 32, dv = static_cast<int>(params.dv);
  for (int i = tile * kTileRows + threadIdx.x / 32; i < (tile + 1) * kTileRows; i += kWindowWarps) {
    const int at = first + i < plan.size ? first_row + first + i : -1;
    const int64_t of_row = head * p.group * p.w + at;
    for (int piece = lane; piece < plan.pitch / 16; piece += 32)
      *reinterpret_cast<uint4*>(rows.queries + i * plan.pitch + 16 * piece) =
          at < 0 ? uint4{} : query_piece<T>(p, b, h, at, piece, plan.wide_queries);
    write_output<T>(rows, plan, i, at < 0 ? nullptr : outs + of_row * dv, dv);
    if (lane > 0) continue;
    // The largest logit and the sum, not their lse: the weight of a key that has nearly all is 1 / sum, and 1 less this
    // is exact.
    RowSum total = at < 0 ? RowSum::none() : totals[of_row];
    if (at >= 0 && p.sink_logits) total.add({p.sink_logits[h * p.group + at / p.w] * kLog2e, 1.0f});
    rows.numbers[i].less = total.sum == 0.0f ? CUDART_INF_F : total.most;
    rows.numbers[i].factor = total.sum == 0.0f ? -1.0f : -1.0f / total.sum;
    rows.limits[i] = at < 0 ? 0 : static_cast<int>(p.limit(b, at % p.w));
  }
  __syncthreads();  // the limits are written
  limits_of_tiles(rows.limits + tile * kTileRows, kTileRows, rows.tiles + tile);
  if (threadIdx.x == 0 && tile == tiles - 1 && tiles % 2) rows.tiles[tiles] = {0, 0};  // 16 bytes are copied at a time
}

// kShared: whether plan.fits.
template <class T, bool kShared, bool kPaged>
__global__ void __launch_bounds__(kWindowThreads, 1)
    drop_scores_kernel(DropScoresParams params, DropPlan plan, const float* outs, char* chunks, float* scores) {
  // Of a lane's keys and values. With 4, rows of up to 256 bytes stay in registers; wider ones are read again for each
  // 16 rows, part by part.
  constexpr int kPieces = kShared ? 4 : 2;
  const Window& p = params.window;
  DYNAMIC_SHARED(char, memory);
  const int64_t unit = blockIdx.x / plan.splits.count, split = blockIdx.x % plan.splits.count;
  const int64_t head = unit / plan.units, b = head / p.heads, h = head % p.heads;
  const int begin = static_cast<int>(split * plan.splits.keys),
            end = static_cast<int>(min(begin + plan.splits.keys, p.n));
  const int first = static_cast<int>(p.first(b)), most = count_rows(p, b).most;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dv = static_cast<int>(params.dv);
  const float* const unit_outs = outs + (head * p.group * p.w + unit % plan.units * plan.size) * dv;
  const int key_pieces = static_cast<int>(p.k.row_bytes / 16), value_pieces = static_cast<int>(params.v.row_bytes / 16);
  const float scale = p.scale * kLog2e, mean = p.group_reduce == Reduce::mean ? 1.0f / p.group : 1.0f;
  const HeadRows all_keys = head_rows<kPaged, T>(p.k, b, h);
  HeadRows all_values = all_keys;  // of the same pages
  all_values.data = params.v.row(kPaged && params.v.table ? 0 : b, h, 0);
  all_values.stride_n = params.v.stride_n;
  if (kPaged) all_values.stride_page = params.v.stride_b;

#pragma unroll 1
  for (int chunk = 0; chunk < plan.chunks; ++chunk) {
    char* const own = chunks + (unit * plan.chunks + chunk) * plan.bytes;
    if constexpr (kShared) {
      __syncthreads();  // the previous chunk is done
      for (int64_t i = threadIdx.x; i < plan.bytes / 16; i += kWindowThreads)
        reinterpret_cast<uint4*>(memory)[i] = reinterpret_cast<const uint4*>(own)[i];
      __syncthreads();  // the rows are there
    }
    const DropRows rows(kShared ? memory : own, plan);

#pragma unroll 1
    for (int key = begin + 16 * warp; key < end; key += 16 * kWindowWarps) {
      float sums[2] = {};  // of keys lane / 4 and lane / 4 + 8
      if (key < most && first < key + 16) {
        const HeadRows key_rows = all_keys.from(key), value_rows = all_values.from(key);
        const int left = most - key;
        float squares[2] = {};
        KeyTile<T, kPieces, 1> keys, values;
        if (key_pieces <= 4 * kPieces) keys.load(key_rows, left, key_pieces, 0, plan.wide);
        for (int part = 0; part * 4 * kPieces < value_pieces; ++part) {
          values.load(value_rows, left, value_pieces, part, plan.wide);
          add_squares<T>(squares, values);
        }
#pragma unroll 1
        for (int tile = 0; tile < plan.rows / kTileRows; ++tile) {
          if (key >= rows.tiles[tile].most) continue;
          Products<1> x, y;
          const char* const out_rows = rows.outs + tile * kTileRows * plan.out_pitch;
          multiply_all<T, kPieces>(x, keys, p.k.row_bytes, key_rows, left, plan.wide,
                                   rows.queries + tile * kTileRows * plan.pitch, plan.pitch);
          multiply_all<T, kPieces>(y, values, params.v.row_bytes, value_rows, left, plan.wide, out_rows,
                                   plan.out_pitch);
          if constexpr (sizeof(T) < 4) {
            Products<1> z;
            multiply_all<T, kPieces>(z, values, params.v.row_bytes, value_rows, left, plan.wide,
                                     out_rows + plan.rows * plan.out_pitch, plan.out_pitch);
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
              for (int e = 0; e < 4; ++e) y[0][t][e] += z[0][t][e];
          }
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = lane / 4 + e / 2 * 8, slot = key + i;
              const int r = tile * kTileRows + 8 * t + lane % 4 * 2 + e % 2;
              if (slot < first || slot >= rows.limits[r]) continue;
              const float logit = p.softcap == 0.0f ? __fmul_rn(x[0][t][e], scale) : logit_of(p, x[0][t][e], kLog2e);
              const DropNumbers of_row = rows.numbers[r];
              const float weight = RowWeight{of_row.less, of_row.factor}.of(logit);
              float distance = fmaf(-2.0f * of_row.scale, y[0][t][e], squares[e / 2] + of_row.square);
              distance = distance < 0.0f ? 0.0f : distance;  // NaN stays
              if (weight > kLargeWeight) {
                const T* const value = reinterpret_cast<const T*>(value_rows.row(i));
                const float* const out = unit_outs + (int64_t{chunk} * plan.rows + r) * dv;
                distance = 0.0f;
#pragma unroll 1
                for (int c = 0; c < dv; ++c) {
                  const float difference = to_float(value[c]) - out[c];
                  distance = fmaf(difference, difference, distance);
                }
              }
              const float gain = __fdividef(weight, fmaxf(1.0f - weight, 0.0f) + params.epsilon);
              sums[e / 2] += fmaf(logit, 0.0f, gain * distance * gain);  // NaN if the logit is not finite
            }
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[i] = lanes_sum<4>(sums[i]) * mean;
      const int slot = key + lane / 4 + lane % 4 * 8;
      if (lane % 4 < 2 && slot < end) {
        float& score = scores[unit * p.n + slot];
        const float sum = lane % 4 ? sums[1] : sums[0];
        score = chunk == 0 ? sum : score + sum;
      }
    }
  }
}

// The maximum over each group: [b, Hq, n] to [b, Hk, n], one thread per score.
__global__ void __launch_bounds__(kWindowThreads) drop_group_max_kernel(Window p, const float* scores, int64_t all) {
  const int64_t i = blockIdx.x * int64_t{kWindowThreads} + threadIdx.x;
  if (i >= all) return;
  const float* const of_key = scores + i / p.n * p.group * p.n + i % p.n;
  float score = of_key[0];
  for (int64_t g = 1; g < p.group; ++g) score = max_nan(score, of_key[g * p.n]);
  p.scores[i] = score;
}

struct DropScoresMemory {
  float* outs;     // [b, Hq, w, dv]
  float* lse;      // [b, Hq, w]
  float2* totals;  // [b, Hq, w], each a RowSum
  float* scores;   // [b, Hq, n] for the maximum over groups, or null
  char* chunks;    // [plan.all_chunks, plan.bytes], the rows
  char* outputs;   // window_outputs' workspace

  DropScoresMemory(const DropScoresParams& p, const DropPlan& plan, Sections& sections) {
    const Window& w = p.window;
    const int64_t rows = w.b * w.heads * w.group * w.w;
    outs = sections.add<float>(rows * p.dv);
    lse = sections.add<float>(rows);
    totals = sections.add<float2>(rows);
    scores = w.group_reduce == Reduce::max ? sections.add<float>(w.b * w.heads * w.group * w.n) : nullptr;
    chunks = sections.add<char>(plan.all_chunks(w) * plan.bytes);
    outputs = sections.add<char>(window_outputs_workspace(attention(p)));
  }

  // The attention whose outputs are needed.
  WindowAttentionParams attention(const DropScoresParams& p) const {
    WindowAttentionParams x{p.window, p.v, reinterpret_cast<char*>(outs), lse, p.dv};
    x.window.scores = nullptr;
    return x;
  }
};

inline void drop_scores_cuda(const DropScoresParams& p, const DropPlan& plan, void* workspace, cudaStream_t stream) {
  const Window& w = p.window;
  Sections sections{workspace};
  const DropScoresMemory memory(p, plan, sections);
  const RowSum* const totals = reinterpret_cast<const RowSum*>(memory.totals);
  float* const scores = memory.scores ? memory.scores : w.scores;
  window_outputs(memory.attention(p), memory.totals, memory.outputs, stream);
  with_dtype(w.dtype, [&](auto type) {
    launch<drop_rows_kernel<decltype(type)>>(grid_of(plan.all_chunks(w) * (plan.rows / kTileRows)), kWindowThreads, 0,
                                             stream, p, plan, memory.outs, totals, memory.chunks);
  });
  with_read_dtype(w.stored, [&](auto type) {
    using T = decltype(type);
    with_pages<T>(w.k, [&](auto paged) {
      const auto start = [&](auto shared) {
        launch<drop_scores_kernel<T, shared, paged>>(grid_of(w.b * w.heads * plan.units * plan.splits.count),
                                                     kWindowThreads, shared ? plan.bytes : 0, stream, p, plan,
                                                     memory.outs, memory.chunks, scores);
      };
      plan.fits ? start(std::true_type{}) : start(std::false_type{});
    });
  });
  if (!memory.scores) return;
  const int64_t all = w.b * w.heads * w.n;
  launch<drop_group_max_kernel>(grid_of((all + kWindowThreads - 1) / kWindowThreads), kWindowThreads, 0, stream, w,
                                memory.scores, all);
}

}  // namespace
}  // namespace kvops
