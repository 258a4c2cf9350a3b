// Observation-window scores: how much the last queries attend to each key.
//
//   logit[i, j] = scale q_i . k_j          (then softcap tanh(logit / softcap); for window_attention, + key_bias[j];
//                                          int8 keys are multiplied by k_scale[j])
//   score[j]    = reduce over rows i, then over query heads, of weight[i] exp(logit[i, j] - lse[i])
//
// Bytes that must move: K once if the lse is given, otherwise twice; the scores are 4 bytes per 2 d bytes of a bf16 K.
//
// window_sums computes the lse if it is not given: each block finds the largest logit and the sum of exponentials of
// each row over one split of the keys, and window_totals combines them in the order of the splits. window_scores then
// multiplies again, takes exponentials and adds them up over the rows. It goes over the keys backward, so that it first
// meets what L2 still holds. With one row per query head (decode) there are few logits: window_sums writes them, [b,
// Hq, n], 4 G bytes per key, and window_row_scores starts from these, so K is read once.
//
// window.cuh explains how keys and rows are multiplied. A tile of 32 keys and 16 rows costs a warp (bf16, d = 128): 32
// tensor-core products of 16 x 8 x 16; 16 loads of 512 bytes from shared memory, each used for two products; and for
// each of the lane's 16 logits one fused multiply-add for the exponent of 2, one exponential, one addition, and one
// multiply-add that turns the sum into NaN if the logit is not finite (l * 0). With 8 heads of 131072 keys, 128 rows
// take 8.4 million such products: 70 us on an H200 at the rate of mma.sync, while the memory takes 62 us. With up to 32
// rows the kernel is memory-bound. A block has 8 warps and up to 255 registers per thread, so a multiprocessor has 64
// KiB of keys in flight.
//
// Rows have limits: row i sees key j if starts <= j < visible[i]. Tiles in which every row sees every key, which is
// nearly all, need no mask; tiles that no row sees are not read. Where a softmax needs a maximum (window_sums), each
// lane keeps its own maximum and sum for each of its rows in shared memory, 16 bytes per two rows. No lane waits for
// another until the split ends, and a sum is rescaled only when its maximum rises.
//
// Grid: x runs over (batch, KV head, split). A score does not depend on the splits, so these are chosen to fill the GPU
// at hand. Sums over keys do, so their splits depend only on the number of keys. Rows that do not fit in shared memory
// are processed in chunks; what a chunk leaves unfinished waits in `scores` (or, half a query head's sum, in `carry`)
// for the same thread.
#pragma once
#include "sm90/hopper.h"
#include "window.cuh"

namespace kvops {
namespace {

constexpr int64_t kWindowShared = 160 * 1024;  // bytes per block at most: the rest of the memory is left to L1

// How rows are divided into chunks in shared memory.
struct RowChunks {
  RowLayout layout;
  int rows;           // per chunk, a multiple of 16
  int pitch;          // bytes from one row of queries to the next
  bool wide;          // whether keys can be read in whole pieces,
  bool wide_queries;  // and queries
  int64_t shared_bytes;

  // more: bytes that a row takes in addition to its query.
  static RowChunks of(const Window& p, const RowLayout& layout, int more) {
    const int pitch = query_pitch(p.k.row_bytes),
              per_tile = kTileRows * (pitch + more) + static_cast<int>(sizeof(Limits));
    const int64_t memory = shared_memory() < kWindowShared ? shared_memory() : kWindowShared;
    const int most = static_cast<int>((memory - 1024) / per_tile), tiles = layout.rows / kTileRows;
    const int chunks = (tiles + most - 1) / most, each = (tiles + chunks - 1) / chunks;
    return {layout,
            each * kTileRows,
            pitch,
            aligned_rows(p.k, p.b, p.heads, p.n),
            aligned_queries(p),
            int64_t{each} * per_tile};
  }
};

// Calls fn(first key, keys, their rows in memory, number of keys) for this warp's tiles in [begin, end) that contain
// any of the keys [first, most). Each tile is loaded while fn works on the previous one (kAhead). Calls missing(first
// key) for the other tiles.
template <class T, int kPieces, bool kBackward, class Fn, class Missing>
__device__ inline void for_tiles(const Window& p, const HeadRows& head, int begin, int end, int first, int most,
                                 bool wide, const Fn& fn, const Missing& missing) {
  using Keys = KeyTile<T, kPieces>;
  constexpr int kKeys = Keys::kKeys;
  const int pieces = static_cast<int>(p.k.row_bytes / 16);
  const bool whole = pieces <= 4 * kPieces;  // otherwise fn loads them, part by part
  const int tiles = (end - begin - 1) / kKeys + 1;
  const auto key_of = [&](int i) { return begin + (kBackward ? tiles - 1 - i : i) * kKeys; };
  const auto needed = [&](int key) { return key < most && first - kKeys < key; };
  const auto load = [&](Keys& to, int i) {
    const int key = key_of(i);
    if (i < tiles && whole && needed(key)) to.load(head.from(key), most - key, pieces, 0, wide);
  };
  Keys keys;
  int i = threadIdx.x / 32;
  if constexpr (Keys::kAhead) load(keys, i);
#pragma unroll 1
  for (; i < tiles; i += kWindowWarps) {
    Keys next;
    if constexpr (Keys::kAhead)
      load(next, i + kWindowWarps);
    else
      load(keys, i);
    const int key = key_of(i);
    if (needed(key))
      fn(key, keys, head.from(key), most - key);
    else
      missing(key);
    if constexpr (Keys::kAhead) keys = next;
  }
}

// ---- Each row's largest logit and sum of exponentials ----

template <class T, int kPieces, bool kPaged>
__global__ void __launch_bounds__(kWindowThreads, 1)
    window_sums_kernel(Window p, RowChunks chunks, Splits splits, RowSum* partial_sums, float* logits) {
  using Keys = KeyTile<T, kPieces>;
  constexpr int kBlocks = Keys::kBlocks;
  DYNAMIC_SHARED(char, queries);                                                           // [rows, pitch]
  float4* const states = reinterpret_cast<float4*>(queries + chunks.rows * chunks.pitch);  // [rows / 8, threads]
  int* const limits = reinterpret_cast<int*>(states + chunks.rows / 8 * kWindowThreads);   // [rows]
  Limits* const tiles = reinterpret_cast<Limits*>(limits + chunks.rows);                   // [rows / 16]

  const int64_t head = blockIdx.x / splits.count, split = blockIdx.x % splits.count;
  const int64_t b = head / p.heads, h = head % p.heads;
  // Splits are counted from the first valid slot, so that a padded row sums as it would alone.
  const int first = static_cast<int>(p.first(b)), most = count_rows(p, b).most;
  const int begin = static_cast<int>(min(first + split * splits.keys, p.n));
  const int end = static_cast<int>(min(begin + splits.keys, p.n));
  const int all = static_cast<int>(p.group * p.w), lane = threadIdx.x % 32;
  const float scale = p.scale * kLog2e;

  for (int row = 0; row < chunks.layout.rows; row += chunks.rows) {
    const int count = min(chunks.rows, chunks.layout.rows - row);
    __syncthreads();  // the previous chunk is done
    load_queries<T>(p, chunks.layout, b, h, row, count, queries, chunks.pitch, limits, chunks.wide_queries);
    for (int i = 0; i < count / 8; ++i)
      states[i * kWindowThreads + threadIdx.x] = make_float4(-CUDART_INF_F, 0.0f, -CUDART_INF_F, 0.0f);
    __syncthreads();  // queries and limits are written
    limits_of_tiles(limits, count, tiles);
    __syncthreads();  // the limits of tiles too

    const auto add_tile = [&](int key, Keys& keys, const HeadRows& rows, int left) {
#pragma unroll 1
      for (int tile = 0; tile < count / kTileRows; ++tile) {
        const Limits limit = tiles[tile];
        if (key >= limit.most) continue;
        Products<kBlocks> x;
        multiply_all<T, kPieces, kHoldsRows<T, kPieces>>(x, keys, p.k.row_bytes, rows, left, chunks.wide,
                                                         queries + tile * kTileRows * chunks.pitch, chunks.pitch,
                                                         KeyTerms<T, kPaged>{p, head}, key);
        const bool plain = first <= key && key <= limit.least - Keys::kKeys && p.softcap == 0.0f && !logits;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int at = tile * kTileRows + 8 * t + lane % 4 * 2;  // the first of this lane's two rows
          float4& state = states[(tile * 2 + t) * kWindowThreads + threadIdx.x];
          RowSum sum[2] = {{state.x, state.y}, {state.z, state.w}};
          float finite = 0;  // becomes NaN if a logit is not finite
          if (plain) {
#pragma unroll
            for (int m = 0; m < kBlocks; ++m)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                x[m][t][e] = __fmul_rn(x[m][t][e], scale);
                finite = fmaf(x[m][t][e], 0.0f, finite);
              }
          }
          if (!plain || finite != 0.0f) {
#pragma unroll
            for (int m = 0; m < kBlocks; ++m)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int j = key + 16 * m + lane / 4 + e / 2 * 8;
                const float logit = plain ? x[m][t][e] : logit_of(p, x[m][t][e], kLog2e);
                const int r = at + e % 2;
                if (logits && row + r < all && j < end) logits[(head * all + row + r) * p.n + j] = logit;
                const bool counts = first <= j && j < limits[r] && fabsf(logit) < CUDART_INF_F;
                x[m][t][e] = counts ? logit : -CUDART_INF_F;
              }
          }
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float top = sum[e].most;
#pragma unroll
            for (int m = 0; m < kBlocks; ++m) top = fmaxf(top, fmaxf(x[m][t][e], x[m][t][2 + e]));
            if (top == -CUDART_INF_F) continue;
            if (top > sum[e].most) {
              sum[e].sum *= exp2_fast(sum[e].most - top);
              sum[e].most = top;
            }
#pragma unroll
            for (int m = 0; m < kBlocks; ++m)
              sum[e].sum += exp2_fast(x[m][t][e] - top) + exp2_fast(x[m][t][2 + e] - top);
          }
          state = make_float4(sum[0].most, sum[0].sum, sum[1].most, sum[1].sum);
        }
      }
    };
    for_tiles<T, kPieces, false>(p, head_rows<kPaged, T>(p.k, b, h), begin, end, first, most, chunks.wide, add_tile,
                                 [](int) {});

    __syncthreads();  // all states are final
    for (int i = threadIdx.x; i < count && row + i < all; i += kWindowThreads) {
      RowSum total = RowSum::none();
      for (int lanes = i % 8 / 2; lanes < kWindowThreads; lanes += 4) {
        const float4 state = states[i / 8 * kWindowThreads + lanes];
        total.add(i % 2 ? RowSum{state.z, state.w} : RowSum{state.x, state.y});
      }
      partial_sums[blockIdx.x * int64_t{all} + row + i] = total;
    }
  }
}

// One warp per row: combines the splits' sums, in order, to the row's. partial_sums: [b * Hk, splits, rows].
__global__ void __launch_bounds__(kWindowThreads)
    window_totals_kernel(const RowSum* partial_sums, int64_t all, int64_t rows, unsigned splits, RowSum* totals) {
  const int64_t row = blockIdx.x * int64_t{kWindowWarps} + threadIdx.x / 32;
  if (row >= all) return;
  RowSum total = RowSum::none();
  for (unsigned split = threadIdx.x % 32; split < splits; split += 32)
    total.add(partial_sums[(row / rows * splits + split) * rows + row % rows]);
#pragma unroll
  for (int step = 16; step; step /= 2)
    total.add({__shfl_xor_sync(kWarp, total.most, step), __shfl_xor_sync(kWarp, total.sum, step)});
  if (threadIdx.x % 32 == 0) totals[row] = total;
}

// ---- Scores ----

// The rows that are reduced together: all G w rows for sums of sums and maxima of maxima, otherwise those of each query
// head.
inline RowLayout score_layout(const Window& p) {
  const bool sums = p.reduce != Reduce::max && (p.group_reduce == Reduce::sum || p.group_reduce == Reduce::mean);
  const bool maxima = p.reduce == Reduce::max && p.group_reduce == Reduce::max;
  return sums || maxima || p.group == 1 ? RowLayout::of(1, p.group * p.w) : RowLayout::of(p.group, p.w);
}

template <class T, int kPieces, bool kPaged>
__global__ void __launch_bounds__(kWindowThreads, 1)
    window_scores_kernel(WindowScoresParams params, RowChunks chunks, Splits splits, const RowSum* totals,
                         float* carry) {
  using Keys = KeyTile<T, kPieces>;
  constexpr int kBlocks = Keys::kBlocks, kOwn = Keys::kOwn;
  const Window& p = params.window;
  const RowLayout layout = chunks.layout;
  DYNAMIC_SHARED(char, queries);                                                       // [rows, pitch]
  float* const less = reinterpret_cast<float*>(queries + chunks.rows * chunks.pitch);  // [rows], of RowWeight
  float* const factors = less + chunks.rows;                                           // [rows]
  int* const limits = reinterpret_cast<int*>(factors + chunks.rows);                   // [rows]
  Limits* const tiles = reinterpret_cast<Limits*>(limits + chunks.rows);               // [rows / 16]

  const unsigned unit_of_grid = gridDim.x - 1 - blockIdx.x;  // backward
  const int64_t head = unit_of_grid / splits.count, split = unit_of_grid % splits.count;
  const int64_t b = head / p.heads, h = head % p.heads;
  const int begin = static_cast<int>(split * splits.keys), end = static_cast<int>(min(begin + splits.keys, p.n));
  const int first = static_cast<int>(p.first(b));
  const Counted counted = count_rows(p, b);
  const int lane = threadIdx.x % 32;
  const bool maximum = p.reduce == Reduce::max, group_maximum = p.group_reduce == Reduce::max;
  const bool each = p.group_reduce == Reduce::none;  // each query head has its own scores
  const float scale = p.scale * kLog2e, nothing = maximum && !params.softmax ? -CUDART_INF_F : 0.0f;
  const float group_factor = p.group_reduce == Reduce::mean ? 1.0f / p.group : 1.0f;
  const float unit_factor =
      (p.reduce == Reduce::mean ? 1.0f / max(counted.rows, 1) : 1.0f) * (layout.units == 1 ? group_factor : 1.0f);

  for (int row = 0; row < layout.rows; row += chunks.rows) {
    const int count = min(chunks.rows, layout.rows - row);
    __syncthreads();  // the previous chunk is done
    load_queries<T>(p, layout, b, h, row, count, queries, chunks.pitch, limits, chunks.wide_queries);
    for (int i = threadIdx.x; i < count; i += kWindowThreads) {
      const int at = layout.at(row + i), g = at / static_cast<int>(p.w), w = at % static_cast<int>(p.w);
      const int64_t query_head = h * p.group + g;
      RowWeight weight{0.0f, 1.0f};
      if (at >= 0 && params.softmax)
        weight =
            score_weight(p, totals ? totals[head * p.group * p.w + at] : total_of_lse(params.lse.at(b, query_head, w)),
                         b, query_head, w);
      less[i] = weight.less;
      factors[i] = weight.factor;
    }
    __syncthreads();  // queries, weights and limits are written
    limits_of_tiles(limits, count, tiles, factors);
    __syncthreads();  // the limits of tiles too

    // The lane's sums over the unit's rows so far (total) are added to those of the three other lanes that share its
    // keys; lane c of these continues with key l / 4 + 8 c. The first part of a unit, and earlier units, may come from
    // the previous chunk.
    const auto score_tile = [&](int key, Keys* keys, const HeadRows& rows, int left) {
      float total[kOwn], group = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) total[i] = nothing;
      int unit = row / layout.padded, eighths = row % layout.padded / 8;
      bool resumed = eighths > 0;
      const int j = key + lane / 4 + lane % 4 * 8;
      const bool mine = lane % 4 < kOwn && j < end;
      if (mine && unit > 0 && !each) group = p.scores[head * p.n + j];
      const auto end_unit = [&](bool complete) {
        if (unit >= layout.units) return;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
#pragma unroll
          for (int step = 1; step < 4; step *= 2) {
            const float other = __shfl_xor_sync(kWarp, total[i], step);
            total[i] = maximum ? max_nan(total[i], other) : total[i] + other;
          }
        float score = total[0];
#pragma unroll
        for (int i = 1; i < kOwn; ++i) score = lane % 4 == i ? total[i] : score;
        float* const out = p.scores + (each ? head * p.group + unit : head) * p.n;
        float* const part = each || layout.units == 1 ? out : carry + head * p.n;
        if (mine) {
          if (resumed) score = maximum ? max_nan(part[j], score) : part[j] + score;
          if (!complete) {
            part[j] = score;
          } else {
            score = first <= j && j < counted.most ? score * unit_factor : 0.0f;
            if (each || layout.units == 1) {
              out[j] = score;
            } else {
              group = unit == 0 ? score : group_maximum ? max_nan(group, score) : group + score;
              out[j] = unit + 1 == layout.units ? group * group_factor : group;
            }
          }
        }
      };
#pragma unroll 1
      for (int tile = 0; tile < count / kTileRows; ++tile) {
        const Limits limit = tiles[tile];
        const bool seen = keys && key < limit.most;
        Products<kBlocks> x;
        if (seen)
          multiply_all<T, kPieces, kHoldsRows<T, kPieces>>(x, *keys, p.k.row_bytes, rows, left, chunks.wide,
                                                           queries + tile * kTileRows * chunks.pitch, chunks.pitch,
                                                           KeyTerms<T, kPaged>{p, head}, key);
        const bool plain =
            first <= key && key <= limit.least - Keys::kKeys && p.softcap == 0.0f && params.softmax && !maximum;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int at = tile * kTileRows + 8 * t + lane % 4 * 2;  // the first of this lane's two rows
          if (seen && plain) {
            const float2 of_rows = *reinterpret_cast<const float2*>(less + at);
#pragma unroll
            for (int m = 0; m < kBlocks; ++m)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const float product = x[m][t][e];
                float& sum = total[2 * m + e / 2];
                sum = fmaf(product, 0.0f, sum);  // NaN if the logit is not finite
                sum += exp2_fast(fmaf(product, scale, e % 2 ? -of_rows.y : -of_rows.x));
              }
          } else if (seen) {
#pragma unroll
            for (int m = 0; m < kBlocks; ++m)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int k = key + 16 * m + lane / 4 + e / 2 * 8;
                const RowWeight weight{less[at + e % 2], factors[at + e % 2]};
                const float logit = logit_of(p, x[m][t][e], params.softmax ? kLog2e : 1.0f);
                const float its = !params.softmax     ? logit
                                  : p.softcap == 0.0f ? weight.of(x[m][t][e], scale)
                                                      : weight.of(logit);
                const float value = fmaf(logit, 0.0f, its);
                float& sum = total[2 * m + e / 2];
                if (first <= k && k < limits[at + e % 2]) sum = maximum ? max_nan(sum, value) : sum + value;
              }
          }
          if (++eighths * 8 == layout.padded) {
            end_unit(true);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) total[i] = nothing;
            ++unit;
            eighths = 0;
            resumed = false;
          }
        }
      }
      if (eighths > 0) end_unit(false);
    };
    for_tiles<T, kPieces, true>(
        p, head_rows<kPaged, T>(p.k, b, h), begin, end, first, counted.most, chunks.wide,
        [&](int key, Keys& keys, const HeadRows& rows, int left) { score_tile(key, &keys, rows, left); },
        [&](int key) { score_tile(key, nullptr, HeadRows{}, 0); });
  }
}

// Scores of one row per query head, from the logits times log2(e), [b, Hq, n]. A thread has kRowKeys keys, because the
// row's weight costs more than a few exponentials.
constexpr int kRowKeys = 4, kRowBlock = kRowKeys * kWindowThreads;
__global__ void __launch_bounds__(kWindowThreads)
    window_row_scores_kernel(Window p, const float* logits, const RowSum* totals, unsigned blocks) {
  const unsigned head = blockIdx.x / blocks, b = head / static_cast<unsigned>(p.heads);
  const int own = static_cast<int>(blockIdx.x % blocks * kRowBlock + threadIdx.x), n = static_cast<int>(p.n);
  const int first = static_cast<int>(p.first(b)), limit = static_cast<int>(p.limit(b, 0));
  const bool each = p.group_reduce == Reduce::none;
  float sums[kRowKeys] = {};
  for (int64_t g = 0; g < p.group; ++g) {
    const int64_t query_head = head * p.group + g;
    const auto seen = [&](int j) { return first <= j && j < limit; };
    float of_keys[kRowKeys];
#pragma unroll
    for (int i = 0; i < kRowKeys; ++i) {
      const int j = own + i * kWindowThreads;
      of_keys[i] = seen(j) ? logits[query_head * p.n + j] : 0.0f;
    }
    const RowWeight weight = score_weight(p, totals[query_head], b, query_head - b * p.heads * p.group, 0);
#pragma unroll
    for (int i = 0; i < kRowKeys; ++i) {
      const int j = own + i * kWindowThreads;
      const float score = seen(j) ? fmaf(of_keys[i], 0.0f, weight.of(of_keys[i])) : 0.0f;
      if (!each)
        sums[i] = g == 0 ? score : p.group_reduce == Reduce::max ? max_nan(sums[i], score) : sums[i] + score;
      else if (j < n)
        p.scores[query_head * p.n + j] = score;
    }
  }
  if (each) return;
#pragma unroll
  for (int i = 0; i < kRowKeys; ++i) {
    const int j = own + i * kWindowThreads;
    if (j < n) p.scores[head * p.n + j] = p.group_reduce == Reduce::mean ? sums[i] / p.group : sums[i];
  }
}

// ---- The passes ----

// How a call without lse is divided.
struct SumsPlan {
  Splits splits;
  int64_t heads, rows;  // KV heads of the batch; rows per head

  static SumsPlan of(const Window& p) { return {Splits::fixed(p.n, 1), p.b * p.heads, p.group * p.w}; }
};

struct SumsMemory {
  RowSum* partial_sums;  // [heads, splits, rows]

  SumsMemory(const SumsPlan& plan, Sections& sections)
      : partial_sums(sections.add<RowSum>(plan.heads * plan.splits.count * plan.rows)) {}
};

// The first pass: each row's sum over each split and, if `logits` is given, the logits.
inline void window_sums_cuda(const Window& p, const SumsPlan& plan, RowSum* partial_sums, float* logits,
                             cudaStream_t stream) {
  if (!logits && !p.key_bias.data &&
      sm90::window_pass(p, nullptr, plan.splits.count, plan.splits.keys, reinterpret_cast<float2*>(partial_sums),
                        nullptr, nullptr, stream))
    return;
  const int state = static_cast<int>(sizeof(float4)) * kWindowThreads / 8;  // per row
  const RowChunks chunks = RowChunks::of(p, RowLayout::of(1, plan.rows), state + static_cast<int>(sizeof(int)));
  with_key_tile(p, [&](auto type, auto pieces) {
    with_pages<decltype(type)>(p.k, [&](auto paged) {
      launch<window_sums_kernel<decltype(type), decltype(pieces)::value, paged>>(
          grid_of(plan.heads * plan.splits.count), kWindowThreads, chunks.shared_bytes, stream, p, chunks, plan.splits,
          partial_sums, logits);
    });
  });
}

// Combines the splits' sums to the rows' totals, [b, Hq, w].
inline void window_totals_cuda(const SumsPlan& plan, const RowSum* partial_sums, RowSum* totals, cudaStream_t stream) {
  const int64_t all = plan.heads * plan.rows;
  launch<window_totals_kernel>(grid_of((all + kWindowWarps - 1) / kWindowWarps), kWindowThreads, 0, stream,
                               partial_sums, all, plan.rows, plan.splits.count, totals);
}

// How the pass over scores is divided.
struct ScoresPlan {
  RowChunks chunks;
  Splits splits;
  bool carry;  // a query head's rows may not fit in one chunk

  static ScoresPlan of(const Window& p) {
    ScoresPlan x{RowChunks::of(p, score_layout(p), sizeof(int) + 2 * sizeof(float)), Splits::of(p.n, p.b * p.heads),
                 false};
    const RowLayout& layout = x.chunks.layout;
    const bool cut = layout.units > 1 && x.chunks.rows < layout.rows && x.chunks.rows % layout.padded;
    x.carry = cut && p.group_reduce != Reduce::none;
    return x;
  }
};

struct ScoresMemory {
  float* carry;  // [b, Hk, n]

  ScoresMemory(const Window& p, Sections& sections)
      : carry(sections.add<float>(ScoresPlan::of(p).carry ? p.b * p.heads * p.n : 0)) {}
};

// The second pass, with the rows' totals, [b, Hq, w]. Also serves as the only pass: totals are then null, and either
// the lse is given or p.softmax is false.
inline void window_scores_pass_cuda(const WindowScoresParams& params, const ScoresPlan& plan, const RowSum* totals,
                                    float* carry, cudaStream_t stream) {
  const Window& p = params.window;
  if (params.softmax && !p.key_bias.data &&
      sm90::window_scores(p, params.lse, reinterpret_cast<const float2*>(totals), stream))
    return;
  with_key_tile(p, [&](auto type, auto pieces) {
    with_pages<decltype(type)>(p.k, [&](auto paged) {
      launch<window_scores_kernel<decltype(type), decltype(pieces)::value, paged>>(
          grid_of(p.b * p.heads * plan.splits.count), kWindowThreads, plan.chunks.shared_bytes, stream, params,
          plan.chunks, plan.splits, totals, carry);
    });
  });
}

// The same from logits, for one row per query head. totals: [b, Hq].
inline void window_row_scores_cuda(const Window& p, const float* logits, const RowSum* totals, cudaStream_t stream) {
  const int64_t blocks = (p.n + kRowBlock - 1) / kRowBlock;
  launch<window_row_scores_kernel>(grid_of(p.b * p.heads * blocks), kWindowThreads, 0, stream, p, logits, totals,
                                   static_cast<unsigned>(blocks));
}

// The workspace of a call with at least one score.
struct WindowScoresMemory {
  RowSum* partial_sums;  // [b, Hk, splits, rows]
  RowSum* totals;        // [b, Hq, w]
  float* logits;         // [b, Hq, n], for one row per query head
  float* carry;          // [b, Hk, n]

  WindowScoresMemory(const WindowScoresParams& params, Sections& sections) {
    const Window& p = params.window;
    const bool makes_lse = params.softmax && !params.lse.data, one_row = makes_lse && p.w == 1;
    const int64_t rows = makes_lse ? p.b * p.heads * p.group * p.w : 0;
    partial_sums = makes_lse ? SumsMemory(SumsPlan::of(p), sections).partial_sums : nullptr;
    totals = sections.add<RowSum>(rows);
    logits = sections.add<float>(one_row ? rows * p.n : 0);
    carry = one_row ? nullptr : ScoresMemory(p, sections).carry;
  }
};

inline void window_scores_cuda(const WindowScoresParams& params, void* workspace, cudaStream_t stream) {
  const Window& p = params.window;
  Sections sections{workspace};
  const WindowScoresMemory memory(params, sections);
  if (params.softmax && !params.lse.data) {
    const SumsPlan plan = SumsPlan::of(p);
    float* const logits = p.w == 1 ? memory.logits : nullptr;
    window_sums_cuda(p, plan, memory.partial_sums, logits, stream);
    window_totals_cuda(plan, memory.partial_sums, memory.totals, stream);
    if (logits) return window_row_scores_cuda(p, logits, memory.totals, stream);
  }
  const RowSum* const totals = params.softmax && !params.lse.data ? memory.totals : nullptr;
  window_scores_pass_cuda(params, ScoresPlan::of(p), totals, memory.carry, stream);
}

}  // namespace
}  // namespace kvops
