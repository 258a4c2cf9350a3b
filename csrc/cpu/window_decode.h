// A decode step with up to 8 query heads in a group: the work of window.h with one row per query head.
//
// So few rows do not fill a vector, and the kernel is bound by the bytes of K and V. Vectors therefore run along the
// channels. A unit of VL / G keys times G queries needs VL dot products, which are reduced together (reduce_lanes) into
// one vector. Logits are laid out [key][G], and the exponentials of the softmax fill their vectors too. Each lane keeps
// statistics of one query; lanes G apart belong to the same query. All queries see the same keys, so there are no
// masks.
//
// The hardware prefetcher does not keep up with K and V in turns, so each block prefetches the next one to L2: V's rows
// during the products with K, K's during those with V. To L1 there would be too few requests in flight, and to prefetch
// V in the same block is too late.
//
// int8 rows are converted in registers, in the order of their channels, as they are multiplied. fp8 takes more
// instructions, so a block of it is converted first.
//
// Three query heads and more are enough for AMX tiles, if there are any. They multiply whole blocks, with prefetches of
// their own (window_decode_tiles.h).
//
// If keys are rotated at their slots, a unit's keys are rotated into scratch that stays in L1, just before their
// products: 48 vector instructions for a key of 64 pairs in bf16 (AVX512-BF16). The tables come from L2 (for_parts).
#pragma once
#include "window_decode_tiles.h"

namespace kvops::KVOPS_ISA {
namespace {

// rotate_row for a dot-product operand. AVX512-BF16's pairs are rounded by the CPU, which flushes subnormal numbers, as
// the dot product itself does.
template <class T>
inline void rotate_operand(char* to, const char* from, int64_t bytes, const float* cos, const float* sin,
                           const SlotRope& rope) {
#if defined(__AVX512BF16__)
  const int64_t half = rope.pairs * 2;  // bytes
  if (kPairs<T> && !rope.interleaved && half % VB == 0) {
    for (int64_t i = 0; i < half; i += VB) {
      F x[2], y[2];
      for (int j = 0; j < 2; ++j) {
        const auto widened = [&](const char* p) {
          __m256i raw;
          memcpy(&raw, p + i + j * (VB / 2), VB / 2);
          return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
        };
        x[j] = widened(from), y[j] = widened(from + half);
        turn(x[j], y[j], load(cos + i / 2 + j * VL), load(sin + i / 2 + j * VL));
      }
      const U first = round_pairs(x[0], x[1]), second = round_pairs(y[0], y[1]);
      memcpy(to + i, &first, VB);
      memcpy(to + half + i, &second, VB);
    }
    return copy_bytes(to + 2 * half, from + 2 * half, bytes - 2 * half);
  }
#endif
  rotate_row<T>(to, from, bytes, cos, sin, rope.pairs, rope.interleaved, PutRegister{});
}

// Tiles for R queries; for fewer than 4 they take as long as vectors.
template <class T, int R, bool Integers>
struct TilesFor {
  typedef NoTiles Type;
};
#if defined(__AMX_BF16__)
template <int R>
  requires(R >= 4)
struct TilesFor<BFloat16, R, false> {
  typedef PairTiles<R> Type;
};
template <int R>
  requires(R >= 4)
struct TilesFor<BFloat16, R, true> {
  typedef DigitTiles<R> Type;
};
#endif

// R: the number of queries, rounded up to a power of two by repeating the last query. Stored: Int8, or T for all
// others.
template <class T, int R, class Stored>
struct DecodeWorker {
  static constexpr bool kDecode = true;
  static constexpr int kQueries = R;
  static constexpr int kUnit = R < VL ? VL / R : 1;    // keys per unit
  static constexpr int kUnitVectors = kUnit * R / VL;  // vectors of logits per unit
  static constexpr int kLanes = kUnitVectors * VL;     // lane i is a logit of query i % R
  static constexpr bool kIntegers = __is_same(Stored, Int8);
  typedef typename TilesFor<T, R, kIntegers>::Type Tiled;
  static constexpr bool kTiles = !__is_same(Tiled, NoTiles);
  static constexpr bool kDots = kPairs<T> && !kIntegers;  // converted to floats, int8 needs no second conversion
  typedef typename Choose<kDots, typename WordsOf<T>::Type, FloatWords>::Type Words;
  typedef typename Choose<kDots, float, T>::Type In;  // bf16 pairs are read as words
  typedef typename Choose<kIntegers, Int8, In>::Type Key;
  typedef typename Choose<kIntegers, Int8, T>::Type Value;  // with as many elements per register

  const Window& p;
  const WindowScratch sizes;
  const RowShape shape;
  const int64_t width;  // of a packed query
  float *const q, *const tile, *const turns, *const wide_keys, *const wide_values, *const rearranged;
  Tiled tiles;
  F offset[kUnitVectors], factor[kUnitVectors], sink[kUnitVectors];
  int64_t head = -1, packed = -1, first = 0, last = 0;
  float weight = 0;

  DecodeWorker(const Window& p_, int64_t dv, float* memory)
      : p(p_),
        sizes(p_, dv, kDecode),
        shape(row_shape<In>(p_.k.row_bytes)),
        width(shape.registers() * kStep<In>),
        q(memory),
        tile(q + sizes.queries),
        turns(tile + sizes.tile),
        wide_keys(turns + sizes.turned),
        wide_values(wide_keys + sizes.wide_keys),
        rearranged(wide_values + sizes.wide_values),
        tiles(p_, dv, rearranged) {}

  bool of_max() const { return p.group_reduce == Reduce::max; }

  // Calls fn(Count<G>), G being the number of queries without the repeated ones. Their products are not computed.
  template <int G = R / 2 + 1, class Fn>
  void with_group(const Fn& fn) const {
    if constexpr (G < R)
      if (p.group > G) return with_group<G + 1>(fn);
    fn(Count<G>{});
  }

  void take_head(int64_t index) {
    if (index == head) return;
    head = index;
    const int64_t b = head / p.heads;
    first = p.first(b);
    last = p.limit(b, 0);
    weight = p.group_reduce == Reduce::mean ? 1.0f / static_cast<float>(p.group) : 1.0f;
    float sinks[kLanes];
    for (int i = 0; i < kLanes; ++i) sinks[i] = p.sink_logits ? p.sink_logits[query_head(i % R)] : -__builtin_inff();
    for (int j = 0; j < kUnitVectors; ++j) sink[j] = load(sinks + j * VL);
  }

  int64_t query_head(int64_t r) const { return head % p.heads * p.group + (r < p.group ? r : p.group - 1); }

  // Packs the queries of the head, unless they are packed already. Vectors do not read repeated ones.
  void pack() {
    if (packed == head) return;
    packed = head;
    memset(q, 0, R * width * 4);
    if constexpr (kTiles)
      if (tiles.on) return tiles.pack(*this);
    for (int64_t r = 0; r < p.group; ++r) {
      const char* const from = p.q.row(head / p.heads, query_head(r), 0);
      float* const to = q + r * width;
      if (kDots && p.q.stride_d == sizeof(T)) {
        copy_bytes(to, from, p.k.row_bytes);
      } else if (!kIntegers && p.q.stride_d == sizeof(T)) {
        for_registers<T>(row_shape<T>(p.k.row_bytes), [&](int64_t c, auto&& load_row) {
          F x[kVecs<T>];
          load_row(reinterpret_cast<const T*>(from), x);
          for (int j = 0; j < kVecs<T>; ++j) store(to + (c * kVecs<T> + j) * VL, x[j]);
        });
      } else {
        for (int64_t c = 0; c < p.d; ++c) {
          T x;
          memcpy(&x, from + c * p.q.stride_d, sizeof(T));
          if constexpr (kDots) {
            memcpy(reinterpret_cast<char*>(to) + 2 * c, &x, 2);
          } else {
            to[channel_slot<Key>(c)] = to_float(x);
          }
        }
      }
    }
  }

  // Sets the rows' factor from their weights. In a sum, repeated queries must not count.
  void set_factor(int j, F x) {
    for (int i = 0; i < VL; ++i) {
      const int64_t g = (j * VL + i) % R;
      if (p.row_weights.data) x[i] *= p.row_weights.at(head / p.heads, query_head(g), 0);
      if (!of_max() && g >= p.group) x[i] = 0.0f;
    }
    factor[j] = x;
  }

  // part: which of the split's keys.
  int64_t end_of(int64_t split, Share part) const {
    const int64_t begin = first + split * split_keys(p.n);
    return last - begin < part.last ? last : begin + part.last;
  }
  template <class Fn>
  void for_blocks(int64_t split, Share part, const Fn& fn) const {
    const char* rows[kBlock];
    const int64_t begin = first + split * split_keys(p.n), end = end_of(split, part);
    for (int64_t i = begin + part.first; i < end; i += kBlock)
      fn(rows_of(p.k, i, end - i < kBlock ? end - i : kBlock, rows, wide_keys));
  }
  // Rows of K or V as the loops read them.
  Block rows_of(const KVView& view, int64_t i, int64_t count, const char** rows, float* widened) const {
    if constexpr (kIntegers)
      return block_of(view.head(head / p.heads, head % p.heads), i, count, rows);
    else
      return read_block(p, view, head, i, count, rows, widened);
  }

  // Prefetches register c of a later block's row. One line at a time: the processor holds few requests for lines, and
  // the loads would wait behind a row's worth of them. 1-byte rows are half as long in memory as registers.
  void prefetch_later(const char* row, int64_t c) const {
    const int64_t byte = p.stored == p.dtype ? c * VB : c * (VB / 2);
    if (byte % 64 == 0) __builtin_prefetch(row + byte, 0, 2);
  }

  // The rows that follow a block's, to prefetch; at the end, those of the block itself.
  Block following(const KVView& view, const Block& block, int64_t end, const char** rows) const {
    const int64_t next = block.first + block.count, left = end - next;
    if (left <= 0) return block;
    return block_of(view.head(head / p.heads, head % p.heads), next, left < kBlock ? left : kBlock, rows);
  }

  // Rotates key i of a block.
  void rotate(char* to, const Block& block, int i) const {
    const SlotRope rope = p.rope;  // a copy, since stores might alias p
    const int64_t slot = block.first + (i < block.count ? i : block.count - 1), b = head / p.heads;
    rotate_operand<T>(to, block.row(i), p.k.row_bytes, rope.cos.row(b, slot), rope.sin.row(b, slot), rope);
  }

  float logit_scale() const { return p.softcap == 0 ? p.scale : p.scale / p.softcap; }
  int64_t stored_bytes(int64_t row_bytes) const { return p.stored == p.dtype ? row_bytes : row_bytes / 2; }

  // Makes tiles prefetch the rows of the next block.
  void look_ahead(const KVView* v, const Block& values, const Block& keys) {
    if constexpr (kTiles)
      tiles.ahead = {{values, keys}, {v ? stored_bytes(v->row_bytes) : 0, stored_bytes(p.k.row_bytes)}, v ? 0 : 1};
  }

  // out: [keys in whole units][R]. Prefetches the rows of `then`.
  void logits(const Block& block, const Block& then, float* out) {
    pack();
    if constexpr (kTiles)
      if (tiles.on) tiles.multiply(*this, block, out);
    if (!tiles.on) with_group([&](auto group) { logits<decltype(group)::value>(block, then, out); });
    if (p.k_scale.data) for_key_values(p.k_scale, block, out, [](F x, F scale) { return x * (scale + scale * 0.0f); });
    for (float* x = out; p.softcap != 0 && x < out + (block.count + kUnit - 1) / kUnit * kLanes; x += VL)
      store(x, tanh(load(x)) * p.softcap);
    if (p.key_bias.data) for_key_values(p.key_bias, block, out, [](F x, F bias) { return x + bias; });
  }
  // Replaces what x, [key][R], has for each key by fn(x, value of the key).
  template <class Fn>
  void for_key_values(const KVView& of, const Block& block, float* x, const Fn& fn) const {
    float values[kBlock] = {};
    read_key_values(p, of, head, block, values);
    for (int i = 0; i < block.count; i += VL, x += R * VL) {
      F repeated[R];  // each value R times
      repeated[0] = load(values + i);
#pragma GCC unroll 3
      for (int count = 1; count < R; count *= 2)
#pragma GCC unroll 4
        for (int j = count - 1; j >= 0; --j) {
          const F y = repeated[j];
          repeated[2 * j] = zip_low(y, y);
          repeated[2 * j + 1] = zip_high(y, y);
        }
      for (int j = 0; j < R; ++j) store(x + j * VL, fn(load(x + j * VL), repeated[j]));
    }
  }
  template <int G>
  void logits(const Block& block, const Block& then, float* out) const {
    const float scale = logit_scale();
    for (int i = 0; i < block.count; i += kUnit) {
      const Key *row[kUnit], *ahead[kUnit];
      const char* then_row[kUnit];
#pragma GCC unroll 16
      for (int k = 0; k < kUnit; ++k) {
        row[k] = reinterpret_cast<const Key*>(block.row(i + k));
        ahead[k] = reinterpret_cast<const Key*>(block.row(i + k + 2 * kUnit));
        then_row[k] = then.row(i + k);
      }
      for (int k = 0; p.rope.pairs && k < kUnit; ++k) {
        char* const to = reinterpret_cast<char*>(turns) + k * round_up(p.k.row_bytes, VB);
        rotate(to, block, i + k);
        row[k] = reinterpret_cast<const Key*>(to);
      }
      F sums[kUnit * R];
#pragma GCC unroll 16
      for (F& sum : sums) sum = F{};  // an initializer would be a slow memset
      for_registers<Key>(shape, [&](int64_t c, auto&& load_row) {
#pragma GCC unroll 16
        for (int k = 0; k < kUnit; ++k) {
          F x[kVecs<In>];
          prefetch(ahead[k], c, 0);
          prefetch_later(then_row[k], c);
          load_row(row[k], x);
#pragma GCC unroll 8
          for (int r = 0; r < G; ++r)
            for (int j = 0; j < kVecs<In>; ++j)
              sums[k * R + r] = Words::add_all(sums[k * R + r], load(q + r * width + (c * kVecs<In> + j) * VL), x[j]);
        }
      });
      for (int k = 0; k < kUnit; ++k)
        for (int r = G; r < R; ++r) sums[k * R + r] = sums[k * R + G - 1];
      for (int j = 0; j < kUnitVectors; ++j) store(out + i * R + j * VL, sum_lanes(sums + j * VL) * scale);
    }
  }

  // Applies op over the lanes of the same query; every one of them gets the result.
  template <class Op>
  static F over_keys(F x, const Op& op) {
    for (int step = R; step < VL; step *= 2) {
      float twice[2 * VL];
      store(twice, x);
      store(twice + VL, x);
      x = op(x, load(twice + step));
    }
    return x;
  }

  // The running softmax, as in WindowWorker. The tile becomes the weights; shrink[r] is the factor for earlier terms.
  void softmax(int count, const float* logits, float* peak, float* total, float* shrink) const {
    F top[kUnitVectors], poison[kUnitVectors] = {};
    for (F& x : top) x = splat(-__builtin_inff());
    const int full = count * R / kLanes * kLanes, end = (count * R + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < full; i += kLanes)
      for (int j = 0; j < kUnitVectors; ++j) {
        const F x = load(logits + i + j * VL);
        top[j] = max(top[j], x);
        poison[j] += x * 0.0f;
        store(tile + i + j * VL, x);
      }
    bool poisoned = full < end;
    for (int j = 0; j < kUnitVectors; ++j) poisoned |= any_nan(poison[j]);
    if (__builtin_expect(poisoned, 0)) {
      for (F& x : top) x = splat(-__builtin_inff());
      for (int i = 0; i < end; i += VL) {
        const int left = count * R - i;
        const F x = load_first(logits + i, left < VL ? left : VL, -__builtin_inff());
        const F usable = x - x == 0.0f ? x : splat(-__builtin_inff());
        F& most = top[i / VL % kUnitVectors];
        most = max(most, usable);
        store(tile + i, usable);
      }
    }
    tiles.keep_awake();
    for (int j = 0; j < kUnitVectors; ++j) {
      const F before = load(peak + j * VL);
      const F now = max(before, over_keys(top[j], [](F a, F b) { return max(a, b); }));
      const F base = Totals::finite_or_zero(now), smaller = exp(before - base);
      F sum = {};
      for (int i = j * VL; i < end; i += kLanes) {
        const F x = exp(load(tile + i) - base);
        store(tile + i, x);
        sum += x;
      }
      store(peak + j * VL, now);
      store(total + j * VL, load(total + j * VL) * smaller + sum);
      store(shrink + j * VL, smaller);
    }
  }

  // Adds the block's weighted rows of V to out, [R][registers of V]. Prefetches the rows of `then`.
  void add_values(const Block& block, const Block& then, int64_t row_bytes, const float* shrink, float* out) {
    const RowShape of_v = row_shape<T>(row_bytes);
    constexpr int kMost = (VB == 64 ? 16 : 8) / (R * kVecs<T>), C = kMost > 4 ? 4 : kMost > 0 ? kMost : 1;
    int c = 0;
    if constexpr (kTiles)
      if (tiles.on) return tiles.add_values(*this, block.count, row_bytes, shrink, out);
    with_group([&](auto group) {
      constexpr int G = decltype(group)::value;
      for (; c + C <= of_v.full; c += C) add_registers<G, C>(block, then, of_v, c, shrink, out);
      if constexpr (C > 2)
        for (; c + 2 <= of_v.full; c += 2) add_registers<G, 2>(block, then, of_v, c, shrink, out);
      for (; c < of_v.registers(); ++c) add_registers<G, 1>(block, then, of_v, c, shrink, out);
    });
  }
  template <int G, int C>
  void add_registers(const Block& block, const Block& then, RowShape of_v, int first_register, const float* shrink,
                     float* out) const {
    constexpr int N = C * kVecs<T>;
    const int64_t v_width = of_v.registers() * kStep<T>;
    out += first_register * kStep<T>;
    F sums[G][N];
#pragma GCC unroll 8
    for (int r = 0; r < G; ++r)
      for (int j = 0; j < N; ++j) sums[r][j] = load(out + r * v_width + j * VL) * shrink[r];
    for (int i = 0; i < block.count; ++i) {
      const Value* const row = reinterpret_cast<const Value*>(block.row(i)) + first_register * kStep<T>;
      F x[N];
      for (int c = 0; c < C; ++c) {
        prefetch_later(then.row(i), first_register + c);
        if (C > 1 || first_register < of_v.full) {
          load(row + c * kStep<T>, x + c * kVecs<T>);
        } else {
          load_part(row, of_v.part, x);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < G; ++r)
        for (int j = 0; j < N; ++j) sums[r][j] += x[j] * tile[i * R + r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < G; ++r)
      for (int j = 0; j < N; ++j) store(out + r * v_width + j * VL, sums[r][j]);
  }

  // A split's statistics and, with V, its weighted sum; called part by part, in order. kept: stores its logits, or
  // null.
  void first_pass(int64_t split, Share part, const KVView* v, float* stats, float* kept, float* out) {
    float *const peak = stats, *const total = stats + kLanes;
    if (part.first == 0) {
      for (int i = 0; i < kLanes; ++i) peak[i] = -__builtin_inff(), total[i] = 0.0f;
      if (v) memset(out, 0, R * row_shape<T>(v->row_bytes).registers() * kStep<T> * 4);
    }
    float* at = kept ? kept + part.first * R : tile;
    for_blocks(split, part, [&](const Block& block) {
      float shrink[kLanes];
      const char *rows[kBlock], *next_keys[kBlock], *next_values[kBlock];
      const Block then_keys = following(p.k, block, end_of(split, part), next_keys);
      Block values{}, then = then_keys;
      if (v) {
        values = rows_of(*v, block.first, block.count, rows, wide_values);
        then = following(*v, block, end_of(split, part), next_values);
      }
      look_ahead(v, then, then_keys);
      if constexpr (kTiles)
        if (v && tiles.on) tiles.take_values(*this, values, v->row_bytes);
      tiles.keep_awake();
      logits(block, then, at);
      softmax(block.count, at, peak, total, shrink);
      tiles.keep_awake();
      if (v && p.v_scale.data) for_key_values(p.v_scale, block, tile, [](F x, F scale) { return x * scale; });
      if (v) add_values(values, then_keys, v->row_bytes, shrink, out);
      if (kept) at += kBlock * R;
    });
    if (part.last < split_keys(p.n)) return;
    if constexpr (kTiles)
      if (v && tiles.on) tiles.restore_order(v->row_bytes, out);
    for (int j = 0; j < kLanes; j += VL) store(total + j, over_keys(load(total + j), [](F a, F b) { return a + b; }));
  }

  void rows_from_stats(const float* stats) {
    for (int j = 0; j < kUnitVectors; ++j) {
      const Totals all(stats, sizes, kLanes, j * VL, sink[j]);
      offset[j] = all.base;
      set_factor(j, all.total > 0.0f ? weight / all.total : F{});
    }
  }

  // Applies op over the R queries of VL keys: vectors of [key][R] are folded, neighbours first, until each lane is a
  // key.
  template <class Op>
  static F over_queries(F* x, const Op& op) {
    int count = R;
    if (R > VL) {
      for (int i = 0; i < VL; ++i) x[i] = op(x[2 * i], x[2 * i + 1]);
      count = VL;
    }
    for (; count > 1; count /= 2)
      for (int i = 0; i < count / 2; ++i) x[i] = op(evens(x[2 * i], x[2 * i + 1]), odds(x[2 * i], x[2 * i + 1]));
    return x[0];
  }

  void score_block(const Block& block, const float* logits, bool dot) const {
    const auto plus = [](F a, F b) { return a + b; };
    for (int i = 0; i < block.count; i += VL) {
      const int count = block.count - i < VL ? block.count - i : VL;
      F weights[R], not_finite[R];
      for (int j = 0; j < R; ++j) {
        const F x = load(logits + i * R + j * VL) - offset[j % kUnitVectors];
        weights[j] = (dot ? x : exp(x)) * factor[j % kUnitVectors];
        not_finite[j] = x * 0.0f;
      }
      if (p.group_reduce == Reduce::none) {
        float all[R * VL];
        for (int j = 0; j < R; ++j) store(all + j * VL, weights[j] + not_finite[j]);
        for (int64_t g = 0; g < p.group; ++g)
          for (int k = 0; k < count; ++k) p.scores[(head * p.group + g) * p.n + block.first + i + k] = all[k * R + g];
        continue;
      }
      const F score =
          of_max() ? over_queries(weights, [](F a, F b) { return max(a, b); }) : over_queries(weights, plus);
      store_first(p.scores + head * p.n + block.first + i, score + over_queries(not_finite, plus), count);
    }
  }

  // Keys that no query sees score 0.
  void score_unseen() const {
    const int64_t rows = p.group_reduce == Reduce::none ? p.group : 1;
    const int64_t begin = last > first ? first : p.n;
    for (int64_t s = head * rows; s < (head + 1) * rows; ++s) {
      memset(p.scores + s * p.n, 0, 4 * begin);
      if (begin < p.n) memset(p.scores + s * p.n + last, 0, 4 * (p.n - last));
    }
  }

  // kept: the split's logits, or null: recompute them.
  void second_pass(int64_t split, const float* kept, bool dot) {
    for_blocks(split, {0, split_keys(p.n)}, [&](const Block& block) {
      if (!kept) {
        const char* next_keys[kBlock];
        const Block then = following(p.k, block, end_of(split, {0, split_keys(p.n)}), next_keys);
        look_ahead(nullptr, then, then);
        logits(block, then, tile);
      }
      score_block(block, kept ? kept : tile, dot);
      if (kept) kept += kBlock * R;
    });
    if (split == 0) score_unseen();
  }
};

template <class T>
struct Type {};

// Calls fn(DecodeWorker type) for a step in T, R being the group's size rounded up to a power of two.
template <class T, class Fn>
inline void with_decode_worker(const Window& p, const Fn& fn) {
  static_assert(kDecodeRows == 8);
  const auto with_stored = [&](auto stored) {
    typedef decltype(stored) Stored;
    if (p.group <= 1) return fn(Type<DecodeWorker<T, 1, Stored>>{});
    if (p.group <= 2) return fn(Type<DecodeWorker<T, 2, Stored>>{});
    if (p.group <= 4) return fn(Type<DecodeWorker<T, 4, Stored>>{});
    fn(Type<DecodeWorker<T, 8, Stored>>{});
  };
  if constexpr (__is_same(T, BFloat16))
    if (p.stored == DType::i8) return with_stored(Int8{});
  with_stored(T{});
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
