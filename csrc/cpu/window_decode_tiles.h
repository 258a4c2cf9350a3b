// A decode step on AMX tiles (tiles.h), for window_decode.h.
//
// A block's 48 keys times the queries of a group take three tiles of keys, and its values are the second operand of
// their product with the weights. Between the two products everything is as without tiles: logits and weights are
// [key][R]. What has more digits than the operands, bf16 or int8, is split into parts, as further rows or columns of
// the tiles. A product of 16 rows takes the same time with 1 to 16 columns.
//
// - PairTiles, for bf16: a weight is the sum of two bf16 numbers. Values are stored in pairs of keys.
// - DigitTiles, for int8: a query is the sum of three int8 numbers times 2^14, 2^7 and 1, times a scale, and a weight
//   that of two. Sums of integers are exact, so the error is 2^-21 of the largest channel of a query, or 2^-16 of the
//   largest weight of a block. Keys are read in place. Values are stored in fours of keys.
//
// A tile is loaded only when all stores to its rows have reached the cache. So the values of a block are rearranged
// before its keys are multiplied. And a tile's products keep the loads of few lines in flight, so the next block's rows
// are prefetched a few at a time throughout.
#pragma once
#include "window.h"

namespace kvops::KVOPS_ISA {
namespace {

// The next block's rows of V and then of K, which are prefetched a few at a time.
struct Ahead {
  Block blocks[2];
  int64_t bytes[2];  // of a row
  int which = 0, row = 0;

  void prefetch(int64_t count) {
    for (; count > 0 && which < 2; --count) {
      const char* const at = blocks[which].row(row);
      for (int64_t byte = 0; byte < bytes[which]; byte += 64) __builtin_prefetch(at + byte, 0, 2);
      if (++row >= blocks[which].count) row = 0, ++which;
    }
  }
};

struct NoTiles {
  static constexpr bool on = false;
  NoTiles(const Window&, int64_t, float*) {}
  void keep_awake() const {}
  void release() const {}
};

#if defined(__AMX_BF16__)
// Rearranges VL keys of [key][R] to vectors of one query; x[i] is then query query_at<R>(i).
template <int R>
inline void by_query(F* x) {
#pragma GCC unroll 3
  for (int size = R; size > 1; size /= 2) {
    F y[R];
#pragma GCC unroll 8
    for (int i = 0; i < R / 2; ++i) {
      const int group = i / (size / 2) * size, in = i % (size / 2);
      y[group + in] = evens(x[group + 2 * in], x[group + 2 * in + 1]);
      y[group + size / 2 + in] = odds(x[group + 2 * in], x[group + 2 * in + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) x[i] = y[i];
  }
}
template <int R>
constexpr int query_at(int i) {  // the bits of i in reverse
  int query = 0;
  for (int bit = 1; bit < R; bit *= 2) query = 2 * query + (i & bit ? 1 : 0);
  return query;
}

// What both kinds share. Registers: 0 and 1 logits, 3 keys, 4 queries, 5 weights, 6 more weights or values, 7 sums.
template <int R>
struct DecodeTiles : Tiles {
  static_assert(kBlock == 3 * kTileRows);
  static constexpr TileShape kSums = {2 * R, VB};
  Ahead ahead{};

  DecodeTiles(bool wanted, TileShape logits, TileShape six)
      : Tiles(wanted, {logits, logits, logits, kWholeTile, logits, kSums, six, kSums}) {}

  // sums[query tile][key][columns] = a block's keys times queries, [query tile][word][columns]. add(i) adds the product
  // of registers 3 and 4 to register i.
  template <int kQueryTiles, class Add>
  void multiply_keys(const Block& keys, int64_t steps, const float* queries, int columns, float* sums, const Add& add) {
    const int64_t pitch = 4 * columns;
    Tiles::written();
    for (int i = 0; i < keys.count; i += kTileRows) {
      _tile_zero(0);
      if constexpr (kQueryTiles > 1) _tile_zero(1);
      const float* tile = queries;
      for (int64_t step = 0; step < steps; ++step, tile += kTileWords * columns) {
        _tile_loadd(3, keys.row(i) + step * VB, keys.stride);
        _tile_loadd(4, tile, pitch);
        add(0);
        if constexpr (kQueryTiles > 1) {
          _tile_loadd(4, tile + steps * kTileWords * columns, pitch);
          add(1);
        }
        ahead.prefetch(11 / steps + 1);
      }
      _tile_stored(0, sums + i * columns, pitch);
      if constexpr (kQueryTiles > 1) _tile_stored(1, sums + (kBlock + i) * columns, pitch);
    }
  }

  // out = out * shrink + sum(r, first, second), [R][width], from both parts of a block's sums, [vector][2][R].
  template <class Sum>
  static void add_sums(int64_t width, const float* sums, const float* shrink, float* out, const Sum& sum) {
    for (int64_t c = 0; c < width; c += VL)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* const at = out + r * width + c;
        const float* const added = sums + c * 2 * R + r * VL;
        store(at, load(at) * shrink[r] + sum(r, load(added), load(added + R * VL)));
      }
  }

  // A block's weights by query: fn(i, query, weights of keys [i, i + VL)).
  template <class Fn>
  void for_weights(float* tile, int count, const Fn& fn) const {
    for (int i = count * R; i < kBlock * R; ++i) tile[i] = 0.0f;
    for (int i = 0; i < kBlock; i += VL) {
      keep_awake();
      F x[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) x[r] = load(tile + (i + r * (VL / R)) * R);
      by_query<R>(x);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) fn(i, query_at<R>(r), x[r]);
    }
  }
};

template <int R>
struct PairTiles : DecodeTiles<R> {
  typedef BFloat16 T;
  static constexpr int kPairRows = 2 * kTileWords;  // of which kBlock / 2 are used
  using Base = DecodeTiles<R>;
  using Base::ahead;

  PairTiles(const Window&, int64_t dv, float* rearranged) : Base(true, {kTileRows, 4 * R}, Base::kSums) {
    if (this->on) memset(rearranged, 0, 4 * kPairRows * round_up(dv, kStep<T>));
  }

  // Packs the queries, [word][R].
  template <class Worker>
  void pack(const Worker& worker) const {
    const Window& p = worker.p;
    for (int64_t r = 0; r < R; ++r) {
      const char* const from = p.q.row(worker.head / p.heads, worker.query_head(r), 0);
      for (int64_t c = 0; c < p.d; ++c)
        memcpy(reinterpret_cast<char*>(worker.q + c / 2 * R + r) + c % 2 * 2, from + c * p.q.stride_d, 2);
    }
  }

  // A block's keys as tiles load them; fp8 is converted already.
  template <class Worker>
  Block rows(const Worker& worker, const Block& block) const {
    const int64_t stride = worker.shape.registers() * VB, bytes = worker.p.k.row_bytes;
    if (!worker.p.rope.pairs)
      return worker.p.stored == worker.p.dtype ? tile_rows(block, bytes, stride, worker.wide_keys) : block;
    for (int i = 0; i < block.count; ++i) {
      char* const to = reinterpret_cast<char*>(worker.turns) + i * stride;
      worker.rotate(to, block, i);
      memset(to + bytes, 0, stride - bytes);
    }
    return made_block(block, worker.turns, stride);
  }

  // scale * q . k, [key][R].
  template <class Worker>
  void multiply(const Worker& worker, const Block& block, float* out) {
    const Block keys = rows(worker, block);
    this->template multiply_keys<1>(keys, worker.shape.registers(), worker.q, R, out,
                                    [](int) { _tile_dpbf16ps(0, 3, 4); });
    const F scale = splat(worker.logit_scale());
    for (float *x = out, *end = out + block.count * R; x < end; x += VL) store(x, load(x) * scale);
  }

  // Rearranges a block's values to [kPairRows][registers of V].
  template <class Worker>
  void take_values(const Worker& worker, const Block& block, int64_t row_bytes) {
    const RowShape of_v = row_shape<T>(row_bytes);
    const int64_t v_width = of_v.registers() * kStep<T>;
    float* to = worker.rearranged;
    for (int i = 0; i < kBlock; i += 2, to += v_width) {
      if (i >= block.count) {
        memset(to, 0, 4 * v_width);
        continue;
      }
      const T* const low = reinterpret_cast<const T*>(block.row(i));
      const T* const high = reinterpret_cast<const T*>(block.row(i + 1));
      const U both = i + 1 < block.count ? U{} - 1 : U{};
      ahead.prefetch(1);
      if (i % 16 == 0) this->keep_awake();
      for_registers<T>(of_v, [&](int64_t c, auto&& load_row) {
        F x[2], y[2];
        load_row(low, x);
        load_row(high, y);
        for (int j = 0; j < 2; ++j) store(to + c * kStep<T> + j * VL, (F)pair(x[j], (F)((U)y[j] & both)));
      });
    }
  }

  // Adds the weighted values to out, [R][registers of V].
  template <class Worker>
  void add_values(const Worker& worker, int count, int64_t row_bytes, const float* shrink, float* out) {
    const int64_t v_width = row_shape<T>(row_bytes).registers() * kStep<T>;
    constexpr int64_t kRow = 2 * VB;  // bytes: of two products
    char* const weights = reinterpret_cast<char*>(worker.tile + kBlock * R);
    this->for_weights(worker.tile, count, [&](int i, int r, F x) {
      const __m256bh first = _mm512_cvtneps_pbh((__m512)x);
      const F rest = x - (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)first), 16);
      const __m256bh second = _mm512_cvtneps_pbh((__m512)rest);
      memcpy(weights + r * kRow + 2 * i, &first, VB / 2);
      memcpy(weights + (R + r) * kRow + 2 * i, &second, VB / 2);
    });
    for (int r = 0; r < 2 * R; ++r) memset(weights + r * kRow + 2 * kBlock, 0, kRow - 2 * kBlock);
    const float* const values = worker.rearranged;
    float* const sums = worker.rearranged + kPairRows * v_width;
    Tiles::written();
    _tile_loadd(5, weights, kRow);
    _tile_loadd(6, weights + VB, kRow);
    for (int64_t c = 0; c < v_width; c += VL) {
      _tile_zero(7);
      _tile_loadd(3, values + c, 4 * v_width);
      _tile_dpbf16ps(7, 5, 3);
      if (count > 2 * kTileWords) {
        _tile_loadd(3, values + kTileWords * v_width + c, 4 * v_width);
        _tile_dpbf16ps(7, 6, 3);
      }
      _tile_stored(7, sums + c * 2 * R, VB);
      ahead.prefetch(40 * VL / v_width + 1);
    }
    this->add_sums(v_width, sums, shrink, out, [](int, F first, F second) { return first + second; });
  }

  void restore_order(int64_t, float*) const {}
};

template <int R>
struct DigitTiles : DecodeTiles<R> {
  static constexpr int kDigits = 3, kColumns = 16;                    // of a tile of queries
  static constexpr int kQueryTiles = kDigits * R > kColumns ? 2 : 1;  // column digit * R + r: of a query
  static constexpr float kLargest = 127 * 256 + 127;                  // of two digits
  using Base = DecodeTiles<R>;
  using Base::ahead;
  float query_scale[VL];  // lane i: of query i % R

  // Rows are whole registers, of 64 channels.
  DigitTiles(const Window& p, int64_t dv, float*) : Base(p.d % VB == 0 && dv % VB == 0, kWholeTile, kWholeTile) {}

  // Packs the queries' digits, [query tile][word][kColumns].
  template <class Worker>
  void pack(const Worker& worker) {
    const Window& p = worker.p;
    for (int64_t r = 0; r < R; ++r) {
      const char* const from = p.q.row(worker.head / p.heads, worker.query_head(r), 0);
      const auto channel = [&](int64_t c) {
        BFloat16 x;
        memcpy(&x, from + c * p.q.stride_d, 2);
        return to_float(x);
      };
      float most = 0.0f, poison = 0.0f;
      for (int64_t c = 0; c < p.d; ++c) {
        const float x = channel(c);
        most = x > most ? x : -x > most ? -x : most;
        poison += x * 0.0f;
      }
      const float up = most >= 0x1p-100f ? 0x1p20f / most : 0.0f;
      for (int i = static_cast<int>(r); i < VL; i += R) query_scale[i] = most * 0x1p-20f + poison;
      for (int64_t c = 0; c < p.d; ++c) {
        const float x = channel(c) * up;
        int32_t left = x == x ? static_cast<int32_t>(x + (x < 0 ? -0.5f : 0.5f)) : 0;
        for (int digit = kDigits - 1; digit >= 0; --digit) {  // the lowest first: in [-64, 64)
          const int32_t low = digit ? ((left + 64) & 127) - 64 : left;
          left = (left - low) >> 7;
          const int64_t column = digit * R + r;
          float* const word = worker.q + (column / kColumns * p.d / 4 + c / 4) * kColumns + column % kColumns;
          reinterpret_cast<int8_t*>(word)[c % 4] = static_cast<int8_t>(low);
        }
      }
    }
  }

  template <class Worker>
  void multiply(const Worker& worker, const Block& block, float* out) {
    constexpr int kTileSums = kBlock * kColumns;
    const int64_t steps = worker.p.d / VB;
    const Block keys = tile_rows(block, worker.p.d, worker.p.d, worker.wide_keys);
    float* const sums = worker.tile + kBlock * R;  // [query tile][key][kColumns], of integers
    this->template multiply_keys<kQueryTiles>(keys, steps, worker.q, kColumns, sums, [](int to) {
      if (to == 0) _tile_dpbssd(0, 3, 4);
      if (to == 1) _tile_dpbssd(1, 3, 4);
    });
    const F scale = load(query_scale) * worker.logit_scale();
    for (int i = 0; i < block.count; i += VL / R) {
      __m512 x[4], digits[kDigits];  // x: four keys, or two of both tiles
      for (int k = 0; k < 4; ++k) x[k] = (__m512)load(sums + k * R / VL * kTileSums + (i + k % (VL / R)) * kColumns);
      by_digit(x, digits);
      const auto of = [&](int digit) { return __builtin_convertvector((I)digits[digit], F); };
      store(out + i * R, ((of(0) * 0x1p14f + of(1) * 0x1p7f) + of(2)) * scale);
    }
  }
  // From [key][digit][R], to [key][R] for each digit.
  static void by_digit(const __m512* x, __m512* digits) {
    const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const __m512 c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    if constexpr (kQueryTiles == 2) {
      digits[0] = a, digits[1] = b, digits[2] = c;
    } else {
      digits[0] = _mm512_shuffle_f32x4(a, c, 0x88);
      digits[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
      digits[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    }
  }

  // Rearranges a block's values to [kTileWords][dv][4 keys], with keys in the order of `digits`. In each 64 channels,
  // word 16 t + 4 g + i is channel 16 g + 4 t + i.
  template <class Worker>
  void take_values(const Worker& worker, const Block& block, int64_t row_bytes) {
    const int64_t dv = row_bytes / 2;
    for (int i = 0; i < kBlock; i += 4) {
      char* const to = reinterpret_cast<char*>(worker.rearranged) + (i % VL + i / VL) * 4 * dv;
      const char* rows[4];
      for (int k = 0; k < 4; ++k) rows[k] = block.row(i + k);
      ahead.prefetch(2);
      if (i % 16 == 0) this->keep_awake();
      for (int64_t c = 0; c < dv; c += VB) {
        __m512i x[4];
        for (int k = 0; k < 4; ++k) memcpy(&x[k], rows[k] + c, VB);
        const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
        const __m512i y = _mm512_unpacklo_epi8(x[2], x[3]), z = _mm512_unpackhi_epi8(x[2], x[3]);
        const __m512i fours[4] = {_mm512_unpacklo_epi16(a, y), _mm512_unpackhi_epi16(a, y), _mm512_unpacklo_epi16(b, z),
                                  _mm512_unpackhi_epi16(b, z)};
        memcpy(to + 4 * c, fours, sizeof fours);
      }
    }
  }

  template <class Worker>
  void add_values(const Worker& worker, int count, int64_t row_bytes, const float* shrink, float* out) {
    const int64_t dv = row_bytes / 2;
    F weights[kBlock / VL][R], most[VL], poison[VL];
#pragma GCC unroll 16
    for (int r = 0; r < VL; ++r) most[r] = F{}, poison[r] = F{};  // an initializer would be a slow memset
    this->for_weights(worker.tile, count, [&](int i, int r, F x) {
      weights[i / VL][r] = x;
      most[r] = max(most[r], max(x, -x));
      poison[r] += x * 0.0f;
    });
    const F largest = reduce_lanes(most, [](F a, F b) { return max(a, b); });
    const F not_finite = sum_lanes(poison);
    float up[VL], down[VL];
    store(up, largest >= 0x1p-110f ? kLargest / largest : F{});
    store(down, largest * (1.0f / kLargest) + not_finite);
    float* const digits = worker.tile + kBlock * R;  // [digit][R] words of four keys: 0, 16, 32, none, 4, 20, 36, ..
    static_assert(kBlock == 3 * VL);
    for (int r = 0; r < R; ++r) {
      __m512i x[4] = {};
      for (int i = 0; i < 3; ++i) x[i] = _mm512_cvtps_epi32((__m512)(weights[i][r] * up[r]));
      const __m512i first = _mm512_packs_epi32(x[0], x[1]), second = _mm512_packs_epi32(x[2], x[3]);
      const auto high = [](__m512i y) { return _mm512_srai_epi16(_mm512_add_epi16(y, _mm512_set1_epi16(128)), 8); };
      const auto low = [](__m512i y) { return _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8); };
      store(digits + r * VL, (F)_mm512_packs_epi16(high(first), high(second)));
      store(digits + (R + r) * VL, (F)_mm512_packs_epi16(low(first), low(second)));
    }
    const float* const values = worker.rearranged;
    float* const sums = worker.rearranged + kTileWords * dv;
    Tiles::written();
    _tile_loadd(5, digits, VB);
    for (int64_t c = 0; c < dv; c += VL) {
      _tile_zero(7);
      _tile_loadd(6, values + c, 4 * dv);
      _tile_dpbssd(7, 5, 6);
      _tile_stored(7, sums + c * 2 * R, VB);
      ahead.prefetch(40 * VL / dv + 1);
    }
    this->add_sums(dv, sums, shrink, out, [&](int r, F high, F low) {
      return (__builtin_convertvector((I)high, F) * 256.0f + __builtin_convertvector((I)low, F)) * down[r];
    });
  }

  // Puts the channels of out, [R][dv], back into order.
  void restore_order(int64_t row_bytes, float* out) const {
    const int64_t dv = row_bytes / 2;
    for (float* x = out; x < out + R * dv; x += VB) {
      float ordered[VB];
      for (int t = 0; t < 4; ++t)
        for (int g = 0; g < 4; ++g) memcpy(ordered + 16 * g + 4 * t, x + 16 * t + 4 * g, 16);
      memcpy(x, ordered, sizeof ordered);
    }
  }
};
#endif

}  // namespace
}  // namespace kvops::KVOPS_ISA
