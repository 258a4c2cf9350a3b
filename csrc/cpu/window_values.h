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
    ValueRows<T>::start(keys);
    const Window& p = worker.p;
    if (p.v_scale.data) read_key_values(p, p.v_scale, worker.head, block, scales);
  }

  template <int N>
  void add(const Chunk& chunk, const F* shrink) const {
    if (worker.p.v_scale.data) worker.template scale_tile<N>(block, scales);
    float* const sums = out + chunk.vector * VL * width;
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
};

}  // namespace
}  // namespace kvops::KVOPS_ISA
