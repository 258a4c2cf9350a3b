// window_scores on the CPU (window.h: packing, register blocks, masks; window_decode.h: w = 1).
//
//   score[j] = sum over rows i that see j of weight_i exp(scale * q_i . k_j - lse_i)
//
// Bytes that must move: K once; twice without lse. But the kernel is compute-bound: G * w products per element of K
// (128 for w 32, G 4: 8 vectors of rows in AVX-512). The loops are therefore those of a matrix product whose result is
// consumed while it is in the cache. With lse, the scores of a block of keys depend on nothing else, so they do not
// depend on how the work is split. Without lse, a first pass computes a maximum and a sum per row and split of the
// keys. The second pass combines and uses these directly, so lse is never rounded.
//
// Work is split over (batch, head) and over splits of at least 3072 keys, whose size depends on n alone.
#include "../ops/window_scores.h"
#include "window_decode.h"

namespace kvops::KVOPS_ISA {
namespace {

inline bool makes_lse(const WindowScoresParams& p) {
  return p.softmax && !p.lse.data;
}

// Scores must be NaN where the logit or the lse is NaN, but not where a wrong lse is infinite (check_lse_total).
float finite_unless_nan(float x) {
  return x > 1e30f ? 1e30f : x < -1e30f ? -1e30f : x;
}

template <class T>
void rows_from_lse(WindowWorker<T>& worker, const RowValues& lse) {
  worker.for_rows([&](int64_t lane, int64_t h, int64_t i) {
    worker.offset[lane] = finite_unless_nan(lse.at(worker.batch(), h, i));
  });
  for (int64_t i = 0; i < worker.lanes; i += VL)
    store(worker.factor + i, worker.weight / (1.0f + exp(load(worker.sink + i) - load(worker.offset + i))));
  worker.weigh_rows();
}

template <class T>
void score(const WindowScoresParams& p, const Workers& workers) {
  const WindowScratch sizes(p.window, 0, false);
  float* const stats = workers.workspace + workers.count * sizes.worker;  // [items][2][lanes]
  float* const kept = stats + sizes.items * sizes.stats;                  // w = 1: [items] of logits
  const bool make_lse = makes_lse(p);
  if (make_lse)
    for_splits<WindowWorker<T>>(p.window, 0, workers, [&](WindowWorker<T>& worker, int64_t item) {
      NoValues none;
      worker.first_pass(item % sizes.splits, stats + item * sizes.stats, kept + item * sizes.logits, none);
    });
  for_splits<WindowWorker<T>>(p.window, 0, workers, [&](WindowWorker<T>& worker, int64_t item) {
    const int64_t split = item % sizes.splits;
    if (make_lse) return worker.second_pass(split, stats + (item - split) * sizes.stats, kept + item * sizes.logits);
    if (p.softmax) {
      rows_from_lse(worker, p.lse);
    } else {
      for (int64_t i = 0; i < worker.lanes; i += VL) store(worker.factor + i, splat(worker.weight));
    }
    worker.score_split(split, !p.softmax);
  });
}

// One row: keeps its logits instead of computing them twice.
template <class Worker>
void score_decode(const WindowScoresParams& p, const Workers& workers, Type<Worker>) {
  const WindowScratch sizes(p.window, 0, Worker::kDecode);
  float* const stats = workers.workspace + workers.count * sizes.worker;
  float* const kept = stats + sizes.items * sizes.stats;
  const bool make_lse = makes_lse(p);
  if (make_lse)
    for_parts<Worker>(p.window, 0, workers, [&](Worker& worker, int64_t item, Share part) {
      worker.first_pass(item % sizes.splits, part, nullptr, stats + item * sizes.stats, kept + item * sizes.logits,
                        nullptr);
    });
  for_splits<Worker>(p.window, 0, workers, [&](Worker& worker, int64_t item) {
    const int64_t split = item % sizes.splits;
    if (make_lse) {
      worker.rows_from_stats(stats + (item - split) * sizes.stats);
    } else {
      for (int j = 0; j < Worker::kUnitVectors; ++j) {
        F lse = {};
        for (int i = 0; i < VL && p.softmax; ++i) {
          const int64_t g = (j * VL + i) % Worker::kQueries, last = p.window.group - 1;
          const int64_t h = worker.head % p.window.heads * p.window.group + (g < last ? g : last);
          lse[i] = finite_unless_nan(p.lse.at(worker.head / p.window.heads, h, 0));
        }
        worker.offset[j] = lse;
        worker.set_factor(j, p.softmax ? worker.weight / (1.0f + exp(worker.sink[j] - lse)) : splat(worker.weight));
      }
    }
    worker.second_pass(split, make_lse ? kept + item * sizes.logits : nullptr, !p.softmax);
  });
}

}  // namespace

void window_scores(const WindowScoresParams& p, Call& call) {
  const WindowScratch sizes(p.window, 0, is_decode(p.window));
  const Workers workers = workers_for(call, window_bytes(p.window), sizes.worker,
                                      makes_lse(p) ? sizes.items * (sizes.stats + sizes.logits) : 0);
  with_dtype(p.window.dtype, [&](auto type) {
    typedef decltype(type) T;
    if (!is_decode(p.window)) return score<T>(p, workers);
    with_decode_worker<T>(p.window, [&](auto worker) { score_decode(p, workers, worker); });
  });
}

}  // namespace kvops::KVOPS_ISA
