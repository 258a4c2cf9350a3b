// The parts that window_scores, window_attention and drop_scores share on the CPU: the logits of a block of keys
// against all rows of a KV head, the softmax statistics, and the scores.
//
// The rows of a KV head (its group's query heads x w) are packed once, and K is read in place (products.h): 128
// rows (w 32, G 4) read K once. For bf16, pairs of channels use the CPU's AMX tiles (level v4_amx, tiles.h) or its bf16
// dot products (v4_bf16), if it has them: exact products, fp32 sums. Other 2-byte rows are widened to floats, a block
// of keys at a time.
//
// A block of 48 keys goes through all steps while it and its logits (48 x 4 vectors) are in the cache; nothing of size
// rows x n is written. Sums over rows (the scores) are sums of vectors, whose lanes are added for VL keys at a time
// (reduce_lanes). Sums over keys (the softmax) are kept per lane and per split of the keys, and combined in order.
//
// Checking for non-finite logits adds no cost to the common path: each logit x is accompanied by a sum of x * 0, which
// stays 0 unless some x is non-finite, and then becomes NaN. Logits are rounded, including the scale, before a maximum
// or a log-sum-exp is subtracted. If the scale were fused with that subtraction into one multiply-add, the difference
// between a large logit and its own (rounded) maximum would be the rounding error instead of 0. Limits are compared
// only in blocks that some row does not see entirely.
#pragma once
#include "../dispatch.h"
#include "products.h"
#include "rope.h"
#include "tiles.h"
#include "window_scratch.h"

namespace kvops::KVOPS_ISA {
namespace {

template <class T>
struct WordsOf {
  typedef FloatWords Type;
};
#if defined(KVOPS_BF16_PRODUCTS)
template <>
struct WordsOf<BFloat16> {
  typedef Bf16Words Type;
};
#endif
template <class T>
constexpr bool kPairs = !__is_same(typename WordsOf<T>::Type, FloatWords);
template <class T>
constexpr bool kWidened = sizeof(T) == 2 && !kPairs<T>;  // to floats, in register order (channel_slot)

template <bool, class A, class B>
struct Choose {
  typedef A Type;
};
template <class A, class B>
struct Choose<false, A, B> {
  typedef B Type;
};

// Converts a block of fp8 or int8 rows to bf16, at `to`.
template <class T>
void widen_bytes(Block& block, int64_t d, float* to) {
  const RowShape shape = row_shape<T>(2 * d);
  const int64_t stride = round_up(2 * d, 4 * kMaxLanes);
  for (int i = 0; i < block.count; ++i) {
    const T* const from = reinterpret_cast<const T*>(block.row(i));
    char* const row = reinterpret_cast<char*>(to) + i * stride;
    for (int c = 0; c < shape.registers(); ++c) {
      const U bits = load_bytes(from + c * (VB / 2), (c < shape.full ? VB : shape.part) / 2);
      memcpy(row + c * VB, &bits, VB);  // rows are padded to whole registers
    }
  }
  block = made_block(block, to, stride);
}

// Rows of K or V in the dtype of the arithmetic. `rows` has space for kBlock addresses, `widened` for as many converted
// 1-byte rows.
inline Block read_block(const Window& p, const KVView& view, int64_t head, int64_t first, int64_t count,
                        const char** rows, float* widened) {
  Block block = block_of(view.head(head / p.heads, head % p.heads), first, count, rows);
  if (p.stored == DType::e4m3) widen_bytes<E4M3>(block, view.row_bytes / 2, widened);
  if (p.stored == DType::e5m2) widen_bytes<E5M2>(block, view.row_bytes / 2, widened);
  if (p.stored == DType::i8) widen_bytes<Int8>(block, view.row_bytes / 2, widened);
  return block;
}

// A block whose rows tiles can load, with one stride and in whole tiles: the block itself, or copies of its rows at
// `copies`, padded to `stride` bytes with zeros.
inline Block tile_rows(const Block& block, int64_t bytes, int64_t stride, float* copies) {
  if (!block.rows && block.count % kTileRows == 0 && bytes == stride) return block;
  for (int i = 0; i < round_up(block.count, kTileRows); ++i) {
    char* const to = reinterpret_cast<char*>(copies) + i * stride;
    copy_bytes(to, block.row(i), bytes);
    memset(to + bytes, 0, stride - bytes);
  }
  return made_block(block, copies, stride);
}

// The vectors of rows in one register block, in packing order.
struct Chunk {
  int64_t vector;  // the first vector
  int64_t count;   // number of vectors
  int64_t segment, in_segment;
};

// A scale as keys are multiplied by it: NaN if it is not finite, which a softcap would hide.
inline float finite_or_nan(float scale) {
  return scale + scale * 0.0f;
}

// The values of a block's keys in one of the tensors that have one per key (key_bias, k_scale, v_scale).
inline void read_key_values(const Window& p, const KVView& of, int64_t head, const Block& block, float* values) {
  const HeadRows rows = of.head(head / p.heads, head % p.heads);
  for (int i = 0; i < block.count; ++i) memcpy(values + i, rows.row(block.first + i), 4);
}

// Rotates a block of keys into `to`.
template <class T>
Block turned(const Window& p, int64_t b, const Block& block, float* to) {
  const Block result = made_block(block, to, round_up(p.k.row_bytes, 4 * kMaxLanes));
  const SlotRope& rope = p.rope;
  const int64_t far = rows_ahead(p.k.row_bytes);
  for (int i = 0; i < block.count; ++i) {
    prefetch_row(block.row(i) + block.ahead(i, far), p.k.row_bytes);
    rotate_row<T>(reinterpret_cast<char*>(to) + i * result.stride, block.row(i), p.k.row_bytes,
                  rope.cos.row(b, block.first + i), rope.sin.row(b, block.first + i), rope.pairs, rope.interleaved,
                  PutRegister{});
  }
  return result;
}

// The softmax statistics of a vector of rows: those of a head's splits, [splits][peaks, totals], combined in order.
struct Totals {
  F peak, own;    // the largest logit, and the sum of exp(logit - peak)
  F base, total;  // the same including the sink; base is finite

  Totals(const float* stats, const WindowScratch& sizes, int64_t lanes, int64_t lane, F sink) {
    peak = splat(-__builtin_inff());
    for (int64_t s = 0; s < sizes.splits; ++s) peak = max(peak, load(stats + s * sizes.stats + lane));
    const F finite = finite_or_zero(peak);
    own = F{};
    for (int64_t s = 0; s < sizes.splits; ++s) {
      const float* const split = stats + s * sizes.stats + lane;
      own += load(split + lanes) * exp(load(split) - finite);
    }
    base = finite_or_zero(max(peak, sink));
    total = own * exp(peak - base) + exp(sink - base);
  }
  static F finite_or_zero(F x) { return x == -__builtin_inff() ? F{} : x; }
};

inline F seen(const int32_t* limit, int64_t slot, F x, float otherwise) {
  I limits;
  memcpy(&limits, limit, VB);
  return limits > static_cast<int32_t>(slot) ? x : splat(otherwise);
}

// The state of one worker: a KV head's packed rows, and scratch for one block of keys.
template <class T>
struct WindowWorker {
  static constexpr bool kDecode = false;
  const Window& p;
  const Segments segments;
  const WindowScratch sizes;
  const int64_t vectors, lanes, words;  // per segment; of all rows; per packed row
  const Tiles tiles;
  float *q, *keys, *values, *tile, *partial, *poison, *block_scores, *group_scores, *turns, *wide_keys, *wide_values,
      *rearranged;
  float *offset, *factor, *sink;           // [lanes]: a row's weight is exp(logit - offset) * factor
  int32_t* limit;                          // [lanes]: 0 in lanes without a row
  const char* key_rows[kBlock];            // the current block's rows, if it is paged
  float biases[kBlock], scales[kBlock];    // of the current block's keys, if they have any
  int64_t head = -1;                       // batch * heads + head, of the packed head
  int64_t first = 0, last = 0, whole = 0;  // some row sees [first, last); all lanes see everything below `whole`
  float weight = 0;                        // of a row: 1, or the factor that turns sums into means

  WindowWorker(const Window& p_, int64_t dv, float* memory)
      : p(p_),
        segments(p_, kDecode),
        sizes(p_, dv, kDecode),
        vectors(segments.vectors(VL)),
        lanes(segments.lanes(VL)),
        words(kWidened<T> ? row_shape<T>(p_.k.row_bytes).registers() * kStep<T> : p_.k.row_bytes / 4),
        tiles(Tiles::all_whole(kPairs<T> && words % kTileWords == 0)) {
    const auto take = [&](int64_t floats) {
      float* array = memory;
      memory += floats;
      return array;
    };
    q = take(sizes.queries);
    keys = take(sizes.keys);
    values = take(sizes.values);
    tile = take(sizes.tile);
    partial = take(sizes.partial);
    poison = take(sizes.partial);
    block_scores = take(kBlock);
    group_scores = take(kBlock);
    offset = take(sizes.row);
    factor = take(sizes.row);
    sink = take(sizes.row);
    limit = reinterpret_cast<int32_t*>(take(sizes.row));
    turns = take(sizes.turned);
    wide_keys = take(sizes.wide_keys);
    wide_values = take(sizes.wide_values);
    rearranged = take(sizes.rearranged);
  }

  int64_t batch() const { return head / p.heads; }
  int64_t query_heads() const { return p.heads * p.group; }
  // Calls fn(lane, query head, row of the window) for every row.
  template <class Fn>
  void for_rows(const Fn& fn) const {
    for (int64_t s = 0; s < segments.count; ++s)
      for (int64_t r = 0; r < segments.rows; ++r) {
        const int64_t row = s * segments.rows + r;
        fn(s * vectors * VL + r, head % p.heads * p.group + row / p.w, row % p.w);
      }
  }

  template <class Fn>
  void for_chunks(const Fn& fn) const {
    for (int64_t s = 0; s < segments.count; ++s)
      for (int64_t v = 0; v < vectors; v += kVectors)
        fn(Chunk{s * vectors + v, vectors - v < kVectors ? vectors - v : kVectors, s, v});
  }

  // Packs the rows of a head, unless they are packed already.
  void take_head(int64_t index) {
    if (index == head) return;
    head = index;
    const int64_t b = batch();
    memset(q, 0, words * lanes * 4);
    for (int64_t i = 0; i < lanes; ++i) limit[i] = 0, offset[i] = 0.0f, factor[i] = 0.0f, sink[i] = -__builtin_inff();
    first = p.first(b);
    last = first;
    whole = p.n;
    for (int64_t i = 0; i < lanes; ++i) limit[i] = 0;
    for_chunks([&](const Chunk& chunk) {
      float* const packed = q + chunk.vector * VL * words;  // [words][chunk.count vectors]
      for (int64_t lane = 0; lane < chunk.count * VL; ++lane) {
        const int64_t r = chunk.in_segment * VL + lane;
        if (r >= segments.rows) continue;
        const int64_t row = chunk.segment * segments.rows + r;
        const char* const from = p.q.row(b, head % p.heads * p.group + row / p.w, row % p.w);
        for (int64_t c = 0; c < p.d; ++c) {
          T x;
          memcpy(&x, from + c * p.q.stride_d, sizeof(T));
          if constexpr (kPairs<T>) {
            memcpy(reinterpret_cast<char*>(packed + c / 2 * chunk.count * VL + lane) + c % 2 * 2, &x, 2);
          } else {
            packed[channel_slot<T>(c) * chunk.count * VL + lane] = to_float(x);
          }
        }
      }
    });
    int64_t counting = 0;
    for (int64_t i = 0; i < p.w; ++i) {
      const int64_t end = p.limit(b, i);
      counting += end > first;
      if (end > last) last = end;
    }
    for_rows([&](int64_t lane, int64_t h, int64_t i) {
      limit[lane] = static_cast<int32_t>(p.limit(b, i));
      if (p.sink_logits) sink[lane] = p.sink_logits[h];
    });
    for (int64_t i = 0; i < lanes; ++i)
      if (limit[i] < whole) whole = limit[i];
    weight = 1.0f;
    if (p.reduce == Reduce::mean && counting) weight /= static_cast<float>(counting);
    if (p.group_reduce == Reduce::mean) weight /= static_cast<float>(p.group);
  }

  // Calls fn(Block) over the keys of a split that some row sees. The grid of blocks starts at the first such key.
  template <class Fn>
  void for_blocks(int64_t split, const Fn& fn) {
    const int64_t size = split_keys(p.n), begin = first + split * size;
    const int64_t end = last - begin < size ? last : begin + size;
    for (int64_t i = begin; i < end; i += kBlock)
      fn(Block{i, static_cast<int>(end - i < kBlock ? end - i : kBlock), nullptr, 0});
  }

  static void widen_rows(int64_t row_bytes, Block& block, float* wide) {
    const RowShape shape = row_shape<T>(row_bytes);
    const int64_t width = shape.registers() * kStep<T>;
    for (int i = 0; i < block.count; ++i)
      for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
        F x[kVecs<T>];
        load_row(reinterpret_cast<const T*>(block.row(i)), x);
        for (int j = 0; j < kVecs<T>; ++j) store(wide + i * width + (c * kVecs<T> + j) * VL, x[j]);
      });
    block = made_block(block, wide, 4 * width);
  }
  void keys_of(Block& block) {
    block = read_block(p, p.k, head, block.first, block.count, key_rows, wide_keys);
    if (p.rope.pairs) block = turned<T>(p, batch(), block, turns);
    if (kWidened<T>) widen_rows(p.k.row_bytes, block, keys);
    if (tiles.on) block = tile_rows(block, p.k.row_bytes, 4 * words, keys);
    if (p.key_bias.data) read_key_values(p, p.key_bias, head, block, biases);
    if (p.k_scale.data) {
      read_key_values(p, p.k_scale, head, block, scales);
      for (int i = 0; i < block.count; ++i) scales[i] = finite_or_nan(scales[i]);
    }
  }

  // Multiplies what the tile has for each key.
  template <int N>
  void scale_tile(const Block& block, const float* by_key) const {
    for (int i = 0; i < block.count; ++i)
      for (float *x = tile + i * N * VL, *end = x + N * VL; x < end; x += VL) store(x, load(x) * by_key[i]);
  }

  // tile[key][N vectors] = scale * q . k, for packed rows.
  template <int N>
  void multiply(const Block& block, const float* rows, float scale) const {
    if constexpr (kHasTiles && kPairs<T>)
      if (tiles.on) return multiply_on_tiles<N>(block, rows, scale);
    products<typename WordsOf<T>::Type, N>(block, rows, words, [&](int first, F(&sums)[kKeysAtOnce<N>][N]) {
      for (int k = 0; k < kKeysAtOnce<N>; ++k)
        for (int v = 0; v < N; ++v) store(tile + ((first + k) * N + v) * VL, sums[k][v] * scale);
    });
  }
  template <int N>
  void multiply_on_tiles(const Block& block, const float* rows, float scale) const {
    for (int first = 0; first < block.count; first += kTileRows) {
      const auto channels = [&](int64_t step) { return block.row(first) + step * VB; };
      multiply_tile<N>(words / kTileWords, channels, block.stride, rows, tile + first * N * VL);
    }
    for (float *x = tile, *end = x + block.count * N * VL; x < end; x += VL) store(x, load(x) * scale);
  }

  // Fills the tile with the logits of a chunk's rows, [key][N vectors].
  template <int N>
  void logits(const Block& block, const Chunk& chunk) const {
    const float scale = p.softcap == 0 ? p.scale : p.scale / p.softcap;
    multiply<N>(block, q + chunk.vector * VL * words, scale);
    if (p.k_scale.data) scale_tile<N>(block, scales);
    for (int i = 0; p.key_bias.data && i < block.count; ++i)
      for (float *x = tile + i * N * VL, *end = x + N * VL; x < end; x += VL) store(x, load(x) + biases[i]);
    if (p.softcap == 0) return;
    for (int64_t i = 0; i < block.count * N * VL; i += VL) store(tile + i, tanh(load(tile + i)) * p.softcap);
  }

  // Whether every lane sees the whole block.
  bool sees_all(const Block& block) const { return block.first + block.count <= whole; }

  // Updates the running softmax of the chunk's rows with the tile's logits: peak is the maximum so far, total the sum
  // of exp(logit - peak). If `keep`, the tile becomes exp(logit - peak). `shrink` is the factor that was applied to
  // earlier terms.
  template <int N>
  void softmax(const Block& block, const Chunk& chunk, float* peak, float* total, F* shrink, bool keep) const {
    const int32_t* const limits = limit + chunk.vector * VL;
    F top[N], poison_sum[N] = {};
    for (int v = 0; v < N; ++v) top[v] = splat(-__builtin_inff());
    for (int i = 0; i < block.count; ++i)
      for (int v = 0; v < N; ++v) {
        const F x = load(tile + (i * N + v) * VL);
        top[v] = max(top[v], x);
        poison_sum[v] += x * 0.0f;
      }
    bool poisoned = false;
    for (int v = 0; v < N; ++v) poisoned |= any_nan(poison_sum[v]);
    if (__builtin_expect(poisoned || !sees_all(block), 0)) {
      for (int v = 0; v < N; ++v) top[v] = splat(-__builtin_inff());
      for (int i = 0; i < block.count; ++i)
        for (int v = 0; v < N; ++v) {
          float* const at = tile + (i * N + v) * VL;
          const F x = load(at);
          const F usable =
              x - x == 0.0f ? seen(limits + v * VL, block.first + i, x, -__builtin_inff()) : splat(-__builtin_inff());
          top[v] = max(top[v], usable);
          store(at, usable);
        }
    }
    F base[N], sums[N] = {};
    for (int v = 0; v < N; ++v) {
      const F before = load(peak + v * VL), now = max(before, top[v]);
      base[v] = now == -__builtin_inff() ? F{} : now;
      shrink[v] = exp(before - base[v]);
      store(peak + v * VL, now);
    }
    for (int i = 0; i < block.count; ++i)
      for (int v = 0; v < N; ++v) {
        const F x = exp(load(tile + (i * N + v) * VL) - base[v]);
        if (keep) store(tile + (i * N + v) * VL, x);
        sums[v] += x;
      }
    for (int v = 0; v < N; ++v) store(total + v * VL, load(total + v * VL) * shrink[v] + sums[v]);
  }

  // Computes the rows' offset and factor from the statistics of a head's splits: exp(logit - offset) * factor is `unit`
  // times the softmax.
  void rows_from_stats(const float* stats, float unit) {
    for (int64_t i = 0; i < lanes; i += VL) {
      const Totals all(stats, sizes, lanes, i, load(sink + i));
      store(offset + i, all.base);
      store(factor + i, all.total > 0.0f ? unit / all.total : F{});
    }
    weigh_rows();
  }

  void weigh_rows() {
    if (!p.row_weights.data) return;
    for_rows([&](int64_t lane, int64_t h, int64_t i) { factor[lane] *= p.row_weights.at(batch(), h, i); });
  }

  // Adds a chunk's weights (Dot: logits) to partial[key], or takes the maximum.
  template <int N, bool Max, bool Dot, bool Masked>
  void add_weights(const Block& block, const Chunk& chunk) const {
    const int64_t row = chunk.vector * VL;
    for (int i = 0; i < block.count; ++i) {
      F sum = load(partial + i * VL), nan = Max ? load(poison + i * VL) : F{};
      for (int v = 0; v < N; ++v) {
        const F x = load(tile + (i * N + v) * VL) - load(offset + row + v * VL);
        F a = (Dot ? x : exp(x)) * load(factor + row + v * VL);
        F not_finite = x * 0.0f;
        if (Masked) {
          a = seen(limit + row + v * VL, block.first + i, a, Max && Dot ? -__builtin_inff() : 0.0f);
          not_finite = seen(limit + row + v * VL, block.first + i, not_finite, 0.0f);
        }
        sum = Max ? max(sum, a) : sum + a;
        (Max ? nan : sum) += not_finite;
      }
      store(partial + i * VL, sum);
      if (Max) store(poison + i * VL, nan);
    }
  }

  // Reduces the lanes of `partial` to the block_scores of a segment.
  void reduce_segment(int count, bool of_max) const {
    for (int i = 0; i < count; i += VL) {
      F rows[VL], nan[VL];
      for (int j = 0; j < VL; ++j) {
        rows[j] = load(partial + (i + j) * VL);
        if (of_max) nan[j] = load(poison + (i + j) * VL);
      }
      F x = of_max ? reduce_lanes(rows, [](F a, F b) { return max(a, b); }) : sum_lanes(rows);
      if (of_max) x += sum_lanes(nan);
      store(block_scores + i, x);
    }
  }

  float* scores_of(int64_t segment) const {
    const bool by_query = p.group_reduce == Reduce::none;
    return p.scores + (by_query ? head * p.group + segment : head) * p.n;
  }

  // Whether the lanes of a segment are reduced by their maximum.
  bool reduces_by_max() const {
    return p.w == 1 && segments.count == 1 ? p.group_reduce == Reduce::max : p.reduce == Reduce::max;
  }

  // Computes the scores of a block of keys. add(Count<N>, chunk) adds the scores of a chunk's rows to `partial`, which
  // begins with `least`, or takes the maximum.
  template <class Add>
  void reduce_block(const Block& block, float least, const Add& add) const {
    const bool of_max = reduces_by_max();
    for (int64_t s = 0; s < segments.count; ++s) {
      for (int i = 0; i < kBlock * VL; i += VL) {
        store(partial + i, splat(least));
        if (of_max) store(poison + i, F{});
      }
      for (int64_t v = 0; v < vectors; v += kVectors) {
        const Chunk chunk{s * vectors + v, vectors - v < kVectors ? vectors - v : kVectors, s, v};
        with_count(chunk.count, [&](auto n) { add(n, chunk); });
      }
      reduce_segment(block.count, of_max);
      const bool alone = segments.count == 1 || p.group_reduce == Reduce::none;
      if (alone) {
        memcpy(scores_of(s) + block.first, block_scores, 4 * block.count);
        continue;
      }
      for (int i = 0; i < kBlock; i += VL) {
        const F x = load(block_scores + i), before = load(group_scores + i);
        F y = x;
        if (s > 0) y = p.group_reduce == Reduce::max ? max(before, x) + (before * 0.0f + x * 0.0f) : before + x;
        store(group_scores + i, y);
      }
      if (s + 1 == segments.count) memcpy(scores_of(0) + block.first, group_scores, 4 * block.count);
    }
  }

  // The same from logits. tile_of(Count<N>, chunk) fills the tile with them.
  template <class TileOf>
  void score_block(const Block& block, bool dot, const TileOf& tile_of) const {
    const bool of_max = reduces_by_max(), masked = !sees_all(block);
    reduce_block(block, of_max && dot ? -__builtin_inff() : 0.0f, [&](auto n, const Chunk& chunk) {
      constexpr int N = decltype(n)::value;
      tile_of(n, chunk);
      if (of_max && dot) {
        masked ? add_weights<N, true, true, true>(block, chunk) : add_weights<N, true, true, false>(block, chunk);
      } else if (of_max) {
        masked ? add_weights<N, true, false, true>(block, chunk) : add_weights<N, true, false, false>(block, chunk);
      } else if (dot) {
        masked ? add_weights<N, false, true, true>(block, chunk) : add_weights<N, false, true, false>(block, chunk);
      } else {
        masked ? add_weights<N, false, false, true>(block, chunk) : add_weights<N, false, false, false>(block, chunk);
      }
    });
  }

  // Keys that no row sees score 0.
  void score_unseen() const {
    for (int64_t s = 0; s < (p.group_reduce == Reduce::none ? p.group : 1); ++s) {
      memset(scores_of(s), 0, 4 * first);
      memset(scores_of(s) + last, 0, 4 * (p.n - last));
    }
  }

  // Computes the scores of a split by multiplying its keys with the rows.
  void score_split(int64_t split, bool dot) {
    for_blocks(split, [&](Block block) {
      keys_of(block);
      score_block(block, dot, [&](auto n, const Chunk& chunk) { logits<decltype(n)::value>(block, chunk); });
    });
    if (split == 0) score_unseen();
  }

  // Without a given lse there are two passes. The first computes the softmax statistics of each split, and with V its
  // weighted sum; the second computes the scores. For w = 1 the logits are kept in between.

  // Copies a block's tile to the buffer of kept logits, or back.
  template <int N, class Move>
  void for_logits(const Block& block, const Chunk& chunk, float* kept, const Move& move) const {
    const int64_t pitch = WindowScratch::logit_pitch(segments);
    kept += chunk.segment * WindowScratch::segment_logits(p, segments) + chunk.in_segment * VL;
    kept += (block.first - first) % split_keys(p.n) * pitch;
    // If rows do not fill the vector, the next key's vector overwrites the excess lanes.
    for (int i = 0; i < block.count; ++i)
      for (int v = 0; v < N; ++v) move(tile + (i * N + v) * VL, kept + i * pitch + v * VL);
  }

  // values.start(block) runs before a block's products. values.add<N>(chunk, shrink) then gets the weights exp(logit -
  // peak) in the tile, if it uses them.
  template <class Values>
  void first_pass(int64_t split, float* stats, float* kept, Values& values) {
    float *const peak = stats, *const total = stats + lanes;
    for (int64_t i = 0; i < lanes; ++i) peak[i] = -__builtin_inff(), total[i] = 0.0f;
    for_blocks(split, [&](Block block) {
      values.start(block);
      keys_of(block);
      for_chunks([&](const Chunk& chunk) {
        with_count(chunk.count, [&](auto n) {
          constexpr int N = decltype(n)::value;
          F shrink[N];
          logits<N>(block, chunk);
          if (sizes.logits) for_logits<N>(block, chunk, kept, [](float* from, float* to) { store(to, load(from)); });
          softmax<N>(block, chunk, peak + chunk.vector * VL, total + chunk.vector * VL, shrink, Values::kUsed);
          values.template add<N>(chunk, shrink);
        });
      });
    });
  }

  // stats: those of all splits of the head.
  void second_pass(int64_t split, const float* stats, float* kept) {
    rows_from_stats(stats, weight);
    if (p.w > 1) return score_split(split, false);
    for_blocks(split, [&](const Block& block) {
      score_block(block, false, [&](auto n, const Chunk& chunk) {
        for_logits<decltype(n)::value>(block, chunk, kept, [](float* out, float* in) { store(out, load(in)); });
      });
    });
    if (split == 0) score_unseen();
  }
};

struct NoValues {
  static constexpr bool kUsed = false;
  void start(const Block&) {}
  template <int N>
  void add(const Chunk&, const F*) {}
};

// The amount of work in a call, expressed as bytes touched.
inline int64_t window_bytes(const Window& p) {
  return p.b * p.heads * p.n * p.k.row_bytes * p.w;
}

// Calls fn(worker, item) for every split of every head. Workers take runs of items, so that a head is packed once or
// twice.
template <class Worker, class Fn>
void for_splits(const Window& p, int64_t dv, const Workers& workers, const Fn& fn) {
  const WindowScratch sizes(p, dv, Worker::kDecode);
  parallel_for(workers, workers.count, [&](int64_t w) {
    Worker worker(p, dv, workers.workspace + w * sizes.worker);
    const Share mine = share(sizes.items, w, workers.count);
    for (int64_t item = mine.first; item < mine.last; ++item) {
      worker.take_head(item / sizes.splits);
      fn(worker, item);
    }
    worker.tiles.release();
  });
}

// Calls fn(worker, item, part) for every part (a run of keys, in order) of every split of every head. Without RoPE a
// part is the whole split. With RoPE, a worker takes one run of keys for all its heads before it moves to the next run:
// a slot's cosines and sines take as many bytes as two heads' 16-bit keys, and this keeps them in the cache.
template <class Worker, class Fn>
void for_parts(const Window& p, int64_t dv, const Workers& workers, const Fn& fn) {
  const WindowScratch sizes(p, dv, Worker::kDecode);
  const int64_t size = split_keys(p.n);
  if (!p.rope.pairs)
    return for_splits<Worker>(p, dv, workers, [&](Worker& worker, int64_t item) { fn(worker, item, Share{0, size}); });
  parallel_for(workers, workers.count, [&](int64_t w) {
    Worker worker(p, dv, workers.workspace + w * sizes.worker);
    const Share mine = share(sizes.items, w, workers.count);
    for (int64_t split = 0; split < sizes.splits; ++split)
      for (int64_t i = 0; i < size; i += kTurnedRun)
        for (int64_t head = mine.first / sizes.splits; head * sizes.splits < mine.last; ++head) {
          const int64_t item = head * sizes.splits + split;
          if (item < mine.first || item >= mine.last) continue;
          worker.take_head(head);
          fn(worker, item, Share{i, i + kTurnedRun < size ? i + kTurnedRun : size});
        }
    worker.tiles.release();
  });
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
