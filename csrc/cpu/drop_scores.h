// drop_scores on the CPU (window.h: packing, register blocks, masks; window_values.h: the first pass over V).
//
//   score[j] = sum over rows i that see j of (a / (1 - a + epsilon))^2 |v_j - o_i|^2,  a = a[i, j]
//   |v - o|^2 = |v|^2 - 2 v . o + |o|^2
//
// Bytes that must move: K and V twice. The first pass is window_attention's: it leaves the softmax statistics, and the
// outputs o in fp32, transposed, which is how `products` takes rows. So the second pass multiplies a block's keys with
// the queries and its values with the outputs, in the same register blocks, and combines both products while they are
// in registers. Rounding o to 2 bytes would not do: where one key has nearly all the weight, v - o is a small
// difference that a / (1 - a) multiplies by a large number. For the same reason it is taken channel by channel for
// large weights.
//
// Work is split over (batch, head) and over splits of at least 3072 keys, whose size depends on n alone.
#include "../ops/drop_scores.h"
#include "window_values.h"

namespace kvops::KVOPS_ISA {
namespace {

// Combines the outputs of a head's splits into those of the first, and computes their squared norms.
template <class T>
void combine(const WindowWorker<T>& worker, int64_t width, const float* stats, float* outs, float* squares) {
  const WindowScratch& sizes = worker.sizes;
  worker.for_chunks([&](const Chunk& chunk) {
    for (int64_t v = 0; v < chunk.count; ++v) {
      const int64_t lane = (chunk.vector + v) * VL;
      const Totals all(stats, sizes, worker.lanes, lane, load(worker.sink + lane));
      F share[kMostSplits], square{};
      for (int64_t s = 0; s < sizes.splits; ++s)
        share[s] = all.own > 0.0f ? exp(load(stats + s * sizes.stats + lane) - all.base) / all.total : F{};
      for (int64_t c = 0; c < width; ++c) {
        float* const at = outs + (chunk.vector * width + c * chunk.count + v) * VL;
        F x{};
        for (int64_t s = 0; s < sizes.splits; ++s) x += load(at + s * sizes.out) * share[s];
        store(at, x);
        square += x * x;
      }
      store(squares + lane, square);
    }
  });
}

// A block of values, with their squared norms.
template <class T>
struct NormedValues : ValueRows<T> {
  using ValueRows<T>::width, ValueRows<T>::block;
  float squares[kBlock];

  NormedValues(WindowWorker<T>& worker, const KVView& v) : ValueRows<T>(worker, v) {}

  void start(const Block& keys) {
    ValueRows<T>::start(keys);
    for (int i = 0; i < block.count; ++i) {
      const float* const row = reinterpret_cast<const float*>(block.row(i));
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < width; ++c) sum += row[c] * row[c];
      squares[i] = sum;
    }
  }

  // |v_i - o|^2 of one lane. out: its first channel, `pitch` floats before the next.
  float distance(int i, const float* out, int64_t pitch) const {
    const float* const row = reinterpret_cast<const float*>(block.row(i));
    float sum = 0;
    for (int64_t c = 0; c < width; ++c) {
      const float x = row[c] - out[c * pitch];
      sum += x * x;
    }
    return sum;
  }
};

// Adds the scores of a chunk's rows, whose logits are in the tile, to `partial`, or takes the maximum. outs: [width][N
// vectors], squares: [N vectors], the chunk's outputs and their squared norms.
template <class T, int N, bool Max, bool Masked>
void add_drops(const WindowWorker<T>& worker, const NormedValues<T>& values, const Chunk& chunk, const float* outs,
               const float* squares, float epsilon) {
  const int64_t row = chunk.vector * VL;
  const Block& block = values.block;
  products<FloatWords, N>(block, outs, values.width, [&](int first, F(&products)[kKeysAtOnce<N>][N]) {
    for (int k = 0; k < kKeysAtOnce<N> && first + k < block.count; ++k) {
      const int i = first + k;
      F sum = load(worker.partial + i * VL), nan = Max ? load(worker.poison + i * VL) : F{};
      for (int v = 0; v < N; ++v) {
        const int64_t lane = row + v * VL;
        const F x = load(worker.tile + (i * N + v) * VL) - load(worker.offset + lane);
        F weight = exp(x) * load(worker.factor + lane);
        F not_finite = x * 0.0f;
        if (Masked) {
          weight = seen(worker.limit + lane, block.first + i, weight, 0.0f);
          not_finite = seen(worker.limit + lane, block.first + i, not_finite, 0.0f);
        }
        F distance = max(F{}, splat(values.squares[i]) - products[k][v] * 2.0f + load(squares + v * VL));
        const F large = weight > kLargeWeight ? splat(__builtin_nanf("")) : F{};
        if (__builtin_expect(any_nan(large), 0)) {
          for (int j = 0; j < VL; ++j)
            if (weight[j] > kLargeWeight) distance[j] = values.distance(i, outs + v * VL + j, N * VL);
        }
        const F gain = weight / (max(F{}, 1.0f - weight) + epsilon);
        const F a = gain * distance * gain * worker.weight;
        sum = Max ? max(sum, a) : sum + a;
        (Max ? nan : sum) += not_finite;
        if (Max) nan += a == a ? F{} : a;  // a maximum need not keep NaN
      }
      store(worker.partial + i * VL, sum);
      if (Max) store(worker.poison + i * VL, nan);
    }
  });
}

template <class T>
void score_drops(const DropScoresParams& p, const Workers& workers) {
  const WindowScratch sizes(p.window, p.dv, false);
  const int64_t width = ValueRows<T>::row_width(p.v.row_bytes);
  float* const stats = workers.workspace + workers.count * sizes.worker;  // [items][2][lanes]
  float* const outs = stats + sizes.items * sizes.stats;                  // [items][lanes * width]
  float* const squares = outs + sizes.items * sizes.out;                  // [heads][lanes]
  Window first = p.window;
  first.scores = nullptr;  // its logits are not kept
  for_splits<WindowWorker<T>>(first, p.dv, workers, [&](WindowWorker<T>& worker, int64_t item) {
    WeightedValues<T> values(worker, p.v, outs + item * sizes.out);
    worker.first_pass(item % sizes.splits, stats + item * sizes.stats, nullptr, values);
  });
  for_splits<WindowWorker<T>>(first, p.dv, workers, [&](WindowWorker<T>& worker, int64_t item) {
    if (item % sizes.splits == 0)
      combine(worker, width, stats + item * sizes.stats, outs + item * sizes.out,
              squares + item / sizes.splits * sizes.lanes);
  });
  for_splits<WindowWorker<T>>(p.window, p.dv, workers, [&](WindowWorker<T>& worker, int64_t item) {
    const int64_t split = item % sizes.splits, head = item - split;
    const float *const out = outs + head * sizes.out, *const square = squares + head / sizes.splits * sizes.lanes;
    const bool of_max = worker.reduces_by_max();
    NormedValues<T> values(worker, p.v);
    worker.rows_from_stats(stats + head * sizes.stats, 1.0f);
    worker.for_blocks(split, [&](Block block) {
      worker.keys_of(block);
      values.start(block);
      const bool masked = !worker.sees_all(block);
      worker.reduce_block(block, 0.0f, [&](auto n, const Chunk& chunk) {
        constexpr int N = decltype(n)::value;
        const int64_t lane = chunk.vector * VL;
        const auto add = [&](auto max, auto mask) {
          add_drops<T, N, max.value, mask.value>(worker, values, chunk, out + lane * width, square + lane, p.epsilon);
        };
        worker.template logits<N>(block, chunk);
        typedef Count<0> No;
        typedef Count<1> Yes;
        if (of_max) {
          masked ? add(Yes{}, Yes{}) : add(Yes{}, No{});
        } else {
          masked ? add(No{}, Yes{}) : add(No{}, No{});
        }
      });
    });
    if (split == 0) worker.score_unseen();
  });
}

}  // namespace

void drop_scores(const DropScoresParams& p, Call& call) {
  const WindowScratch sizes(p.window, p.dv, false);
  const int64_t heads = p.window.b * p.window.heads;
  const Workers workers = workers_for(call, 2 * window_bytes(p.window), sizes.worker,
                                      sizes.items * (sizes.stats + sizes.out) + heads * sizes.lanes);
  with_dtype(p.window.dtype, [&](auto type) { score_drops<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
