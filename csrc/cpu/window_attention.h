// window_attention on the CPU (window.h: packing, register blocks, masks).
//
//   out[i] = sum over j of a[i, j] v_j,  a[i, j] = exp(scale * q_i . k_j - lse_i),  score[j] = sum over i of a[i, j]
//
// Bytes that must move: K and V once; for the scores also K again (w > 1), or the logits (w = 1: G floats per key;
// window_decode.h).
//
// FlashAttention over splits of the keys. A block of 48 keys yields its logits, the running softmax turns them into
// weights in place, and the weights multiply the block's V rows. Each element of V is broadcast against vectors of
// rows, as for K, so the output sums are transposed, [dv][rows]. 2-byte V rows are widened and weights stay fp32,
// except on tiles (window_values.h). Every split keeps its own maxima, sums and outputs, which are combined in key
// order. Then lse is known, and the scores are window_scores' second pass. This second product is cheaper than writing
// and reading rows x n logits (with 128 rows, 128 floats per key, for a key of 128 channels).
//
// Work is split over (batch, head) and over splits of at least 3072 keys, whose size depends on n alone.
#include "../ops/window_attention.h"
#include "window_decode.h"
#include "window_values.h"

namespace kvops::KVOPS_ISA {
namespace {

// Writes a chunk's rows of out and lse, from all splits of the head.
template <class T>
void finish(const WindowAttentionParams& p, const WindowScratch& sizes, const WindowWorker<T>& worker,
            const Chunk& chunk, const float* stats, const float* outs) {
  const int64_t width = ValueRows<T>::row_width(p.v.row_bytes);
  for (int64_t v = 0; v < chunk.count; ++v) {
    const int64_t lane = (chunk.vector + v) * VL;
    const Totals all(stats, sizes, worker.lanes, lane, load(worker.sink + lane));
    const int64_t rows = worker.segments.rows - (chunk.in_segment + v) * VL;
    const int64_t count = rows < VL ? rows : VL;
    // Rows are consecutive in out and lse, [heads * group, w, dv], in the order of the segments.
    const int64_t row =
        worker.head * p.window.group * p.window.w + chunk.segment * worker.segments.rows + (chunk.in_segment + v) * VL;
    for (int64_t i = 0; i < count; ++i)
      p.lse[row + i] =
          all.own[i] > 0.0f ? static_cast<float>(all.peak[i] + log(double{all.own[i]})) : -__builtin_inff();
    F share[kMostSplits];
    for (int64_t s = 0; s < sizes.splits; ++s)
      share[s] = exp(load(stats + s * sizes.stats + lane) - all.base) / all.total;
    T* const to = reinterpret_cast<T*>(p.out) + row * p.dv;
    for (int64_t c = 0; c < p.dv; ++c) {
      const int64_t slot = sizeof(T) == 2 ? channel_slot<T>(c) : c;
      F sum = {};
      for (int64_t s = 0; s < sizes.splits; ++s) {
        sum += load(outs + s * sizes.out + (chunk.vector * width + slot * chunk.count + v) * VL) * share[s];
      }
      const F x = all.own > 0.0f ? sum : F{};
      for (int64_t i = 0; i < count; ++i) from_float(x[i], to + i * p.dv + c);
    }
  }
}

template <class T>
void attend(const WindowAttentionParams& p, const Workers& workers) {
  const WindowScratch sizes(p.window, p.dv, false);
  float* const stats = workers.workspace + workers.count * sizes.worker;  // [items][2][lanes]
  float* const outs = stats + sizes.items * sizes.stats;                  // [items][lanes * width]
  float* const kept = outs + sizes.items * sizes.out;                     // w = 1: [items] of logits, for the scores
  for_splits<WindowWorker<T>>(p.window, p.dv, workers, [&](WindowWorker<T>& worker, int64_t item) {
    WeightedValues<T> values(worker, p.v, outs + item * sizes.out);
    worker.first_pass(item % sizes.splits, stats + item * sizes.stats, kept + item * sizes.logits, values);
  });
  for_splits<WindowWorker<T>>(p.window, p.dv, workers, [&](WindowWorker<T>& worker, int64_t item) {
    const int64_t split = item % sizes.splits, head = item - split;
    if (p.window.scores) worker.second_pass(split, stats + head * sizes.stats, kept + item * sizes.logits);
    // The splits of a head divide its rows among them.
    int64_t index = 0;
    worker.for_chunks([&](const Chunk& chunk) {
      if (index++ % sizes.splits == split)
        finish(p, sizes, worker, chunk, stats + head * sizes.stats, outs + head * sizes.out);
    });
  });
}

// One row: keeps its logits for the scores, if these are requested.
template <class T, class Worker>
void attend_decode(const WindowAttentionParams& p, const Workers& workers, Type<Worker>) {
  const WindowScratch sizes(p.window, p.dv, Worker::kDecode);
  float* const stats = workers.workspace + workers.count * sizes.worker;
  float* const outs = stats + sizes.items * sizes.stats;
  float* const kept = outs + sizes.items * sizes.out;
  const RowShape of_v = row_shape<T>(p.v.row_bytes);
  const int64_t width = of_v.registers() * kStep<T>;
  for_parts<Worker>(p.window, p.dv, workers, [&](Worker& worker, int64_t item, Share part) {
    worker.first_pass(item % sizes.splits, part, &p.v, stats + item * sizes.stats,
                      sizes.logits ? kept + item * sizes.logits : nullptr, outs + item * sizes.out);
  });
  for_splits<Worker>(p.window, p.dv, workers, [&](Worker& worker, int64_t item) {
    const int64_t split = item % sizes.splits, head = item - split;
    if (p.window.scores) {
      worker.rows_from_stats(stats + head * sizes.stats);
      worker.second_pass(split, kept + item * sizes.logits, false);
    }
    if (split > 0) return;
    for (int64_t g = 0; g < p.window.group; ++g) {
      const int64_t lane = g / VL * VL, i = g % VL, row = worker.head * p.window.group + g;
      const Totals all(stats + head * sizes.stats, sizes, Worker::kLanes, lane, worker.sink[g / VL]);
      const bool any = all.own[i] > 0.0f;
      p.lse[row] = any ? static_cast<float>(all.peak[i] + log(double{all.own[i]})) : -__builtin_inff();
      float share[kMostSplits];
      for (int64_t s = 0; s < sizes.splits; ++s) {
        const F x = exp(load(stats + (head + s) * sizes.stats + lane) - all.base) / all.total;
        share[s] = x[i];
      }
      for (int c = 0; c < of_v.registers(); ++c) {
        F x[kVecs<T>] = {};
        for (int64_t s = 0; any && s < sizes.splits; ++s)
          for (int j = 0; j < kVecs<T>; ++j)
            x[j] += load(outs + (head + s) * sizes.out + g * width + (c * kVecs<T> + j) * VL) * share[s];
        if (kInOrder<typename Worker::Value> && !kInOrder<T>) {
          const F even = evens(x[0], x[1]);
          x[1] = odds(x[0], x[1]);
          x[0] = even;
        }
        const U bits = narrow(x, static_cast<const T*>(nullptr));
        memcpy(p.out + row * p.v.row_bytes + c * VB, &bits, c < of_v.full ? VB : of_v.part);
      }
    }
  });
}

// Without keys there are no splits.
void attend_nothing(const WindowAttentionParams& p) {
  const int64_t rows = p.window.b * p.window.heads * p.window.group * p.window.w;
  for (int64_t i = 0; i < rows; ++i) p.lse[i] = -__builtin_inff();
  memset(p.out, 0, rows * p.v.row_bytes);
}

}  // namespace

void window_attention(const WindowAttentionParams& p, Call& call) {
  if (p.window.n == 0) return attend_nothing(p);
  const WindowScratch sizes(p.window, p.dv, is_decode(p.window));
  const Workers workers =
      workers_for(call, window_bytes(p.window), sizes.worker, sizes.items * (sizes.stats + sizes.out + sizes.logits));
  with_dtype(p.window.dtype, [&](auto type) {
    typedef decltype(type) T;
    if (!is_decode(p.window)) return attend<T>(p, workers);
    with_decode_worker<T>(p.window, [&](auto worker) { attend_decode<T>(p, workers, worker); });
  });
}

}  // namespace kvops::KVOPS_ISA
