// The first pass over V on the CPU, which window_attention and drop_scores share: sums of V rows, weighted by the
// running softmax.
#pragma once
#include "window.h"

namespace kvops::KVOPS_ISA {
namespace {

// The values of a block of keys, as floats.
template <class T>
struct ValueRows {
  WindowWorker<T>& worker;
  const KVView& v;
  const int64_t width;  // of a row of V, padded to whole registers
  Block block{};
  const char* rows[kBlock];

  static int64_t row_width(int64_t row_bytes) {
    return sizeof(T) == 2 ? row_shape<T>(row_bytes).registers() * kStep<T> : row_bytes / 4;
  }

  ValueRows(WindowWorker<T>& worker_, const KVView& v_) : worker(worker_), v(v_), width(row_width(v_.row_bytes)) {}

  void start(const Block& keys) {
    block = read_block(worker.p, v, worker.head, keys.first, keys.count, rows, worker.wide_values);
    if (sizeof(T) == 2) worker.widen_rows(v.row_bytes, block, worker.values);
  }
};

// One split's sums of weighted V rows, transposed: a chunk's are [width][N vectors].
template <class T>
struct WeightedValues : ValueRows<T> {
  static constexpr bool kUsed = true;
  using ValueRows<T>::worker, ValueRows<T>::width, ValueRows<T>::block;
  float* const out;
  float scales[kBlock];  // of int8 values

  WeightedValues(WindowWorker<T>& worker_, const KVView& v_, float* out_) : ValueRows<T>(worker_, v_), out(out_) {
    memset(out, 0, worker.lanes * width * 4);
  }

  void start(const Block& keys) {
    const Window& p = worker.p;
    if (worker.tiles.on) {
      block = read_block(p, this->v, worker.head, keys.first, keys.count, this->rows, worker.wide_values);
      if constexpr (kHasTiles && kPairs<T>) this->transpose();
    } else {
      ValueRows<T>::start(keys);
    }
    if (p.v_scale.data) read_key_values(p, p.v_scale, worker.head, block, scales);
  }

  template <int N>
  void add(const Chunk& chunk, const F* shrink) const {
    if (worker.p.v_scale.data) worker.template scale_tile<N>(block, scales);
    float* const sums = out + chunk.vector * VL * width;
    if constexpr (kHasTiles && kPairs<T>)
      if (worker.tiles.on) return this->template add_on_tiles<N>(shrink, sums);
    int64_t c = 0;
    if constexpr (N <= kVectors / 2)
      for (; c + 8 <= width; c += 8) add_channels<N, 8>(c, shrink, sums);
    for (; c < width; c += 4) add_channels<N, 4>(c, shrink, sums);
  }

  template <int N, int C>
  void add_channels(int64_t channel, const F* shrink, float* out) const {
    F sums[C][N] = {};  // of this block: added one by one, small terms would be lost beside a large sum
    for (int i = 0; i < block.count; ++i) {
      const char* const row = block.row(i) + 4 * channel;
      F weights[N];
      for (int j = 0; j < N; ++j) weights[j] = load(worker.tile + (i * N + j) * VL);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        float x;
        memcpy(&x, row + 4 * c, 4);
        for (int j = 0; j < N; ++j) sums[c][j] += weights[j] * x;
      }
    }
    for (int c = 0; c < C; ++c)
      for (int j = 0; j < N; ++j) {
        float* const at = out + ((channel + c) * N + j) * VL;
        store(at, load(at) * shrink[j] + sums[c][j]);
      }
  }

#if defined(__AMX_BF16__)
  // On tiles (tiles.h) the transposed values are the first operand and the weights the second, in pairs of keys. Each
  // weight is the sum of two bf16 numbers, so the products are exact to 2^-16 of it. A block takes two products, of 32
  // keys and of the other 16.
  static constexpr int kProducts = 2, kProductKeys = 2 * kTileWords;

  // Transposes the block's values to [product][width][kTileWords pairs of keys].
  void transpose() const {
    const RowShape of_v = row_shape<T>(this->v.row_bytes);
    for (int first = 0; first < block.count; first += kProductKeys) {
      float* const to = worker.values + first / kProductKeys * width * kTileWords;
      for_registers<T>(of_v, [&](int64_t c, auto&& load_row) {
        F pairs[kVecs<T>][VL];
        for (int i = 0; i < VL; ++i) {
          const int key = first + 2 * i;
          F x[kVecs<T>], y[kVecs<T>];
          load_row(reinterpret_cast<const T*>(block.row(key)), x);
          load_row(reinterpret_cast<const T*>(block.row(key + 1)), y);
          for (int j = 0; j < kVecs<T>; ++j)
            pairs[j][i] = (F)pair(key < block.count ? x[j] : F{}, key + 1 < block.count ? y[j] : F{});
        }
        for (int j = 0; j < kVecs<T>; ++j) {
          F* x = pairs[j];
          F y[VL];
          for (int round = 0; round < 4; ++round) {  // a perfect shuffle, which transposes after log2(VL) rounds
            for (int i = 0; i < VL / 2; ++i) {
              y[2 * i] = zip_low(x[i], x[i + VL / 2]);
              y[2 * i + 1] = zip_high(x[i], x[i + VL / 2]);
            }
            for (int i = 0; i < VL; ++i) x[i] = y[i];
          }
          for (int i = 0; i < VL; ++i) store(to + ((c * kVecs<T> + j) * VL + i) * kTileWords, x[i]);
        }
      });
    }
  }

  template <int N>
  void add_on_tiles(const F* shrink, float* out) const {
    constexpr int64_t kPart = kTileWords * N * VL;  // floats of a product's weights
    float* const weights = worker.rearranged;       // [product][2][kTileWords][N vectors]
    float* const sums = weights + kProducts * 2 * kPart;
    const int products = block.count > kProductKeys ? 2 : 1;
    for (int i = 0; i < products * kTileWords; ++i)
      for (int j = 0; j < N; ++j) {
        const auto weight = [&](int key) { return key < block.count ? load(worker.tile + (key * N + j) * VL) : F{}; };
        const F x = weight(2 * i), y = weight(2 * i + 1);
        const auto rest = [](F whole) {  // beyond the upper 16 bits, rounded to as many
          return (F)((U)(whole - (F)((U)whole & 0xffff0000u)) + 0x8000u);
        };
        float* const to = weights + i / kTileWords * 2 * kPart + (i % kTileWords * N + j) * VL;
        store(to, (F)pair(x, y));
        store(to + kPart, (F)pair(rest(x), rest(y)));
      }
    Tiles::written();
    for (int64_t c = 0; c < width; c += VL) {
      const auto values = [&](int64_t step) { return worker.values + (step / 2 * width + c) * kTileWords; };
      multiply_tile<N>(2 * products, values, VB, weights, sums);
      for (int i = 0; i < VL; ++i)
        for (int j = 0; j < N; ++j) {
          float* const at = out + ((c + i) * N + j) * VL;
          store(at, load(at) * shrink[j] + load(sums + (i * N + j) * VL));
        }
    }
  }
#endif
};

}  // namespace
}  // namespace kvops::KVOPS_ISA
