// KeyDiff scores on the CPU.
//
//   mu = sum_j k_j / |k_j|,  score_i = -cos(k_i, mu)
//
// Bytes that must move: K twice, since no score is known before the sum is complete (once if the anchor is given). The
// first pass leaves 1/|k_i| in the output, so the second pass needs only a dot product. It goes over the blocks
// backward, so that it first meets what the first pass read last, which is still in the cache; within a block it goes
// forward, which suits the hardware prefetcher.
//
// If the heads divide evenly over the threads, each head goes to one thread, which then waits for no other. On a busy
// machine, where some thread is always descheduled, splitting every head over all threads takes two or three times as
// long. Heads are split over n, one after the other, if there are too few of them, and if the shared cache holds one
// head but not one per thread, so that the second pass stays in the cache.
//
// The sum over n is computed in blocks of kBlock tokens, combined in order in fp64, and within a block in runs that
// start from 0. It is accurate even for very similar keys and does not depend on the number of threads. Keys that are
// not normalized may overflow fp32 in the sum. The sum is then recomputed from scaled-down keys, since scores need only
// its direction.
//
// Rows are processed in tiles; rows whose squared norm is outside the safe fp32 range are redone in double
// (unit_keys.h).
#include "../dispatch.h"
#include "../ops/anchor_cosine.h"
#include "unit_keys.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kBlock = 512, kRun = 64;
constexpr float kScaledDown = 0x1p-40f;

template <class T>
float careful_score(const T* row, int64_t d, const float* direction) {
  double dot = 0;
  for (int64_t c = 0; c < d; ++c) dot += double(to_float(row[c])) * direction[channel_slot<T>(c)];
  return static_cast<float>(0.0 - dot / careful_norm(row, d));
}

// On entry, scores holds the tile's 1/|k|; on return, minus the cosine with the unit vector `direction`.
template <class T>
inline void cosines(const Rows<T>& rows, int64_t i, int64_t end, const float* direction, float* scores) {
  const Tile<T> tile(rows, i, end);
  const F inverse = load_first(scores, tile.count, 1.0f);
  const F cosine = 0.0f - tile.dots(rows.shape, direction) * inverse;
  if (__builtin_expect(!any_nan(inverse > 0.0f ? cosine : splat(__builtin_nanf(""))), 1)) {
    store_first(scores, cosine, tile.count);
    return;
  }
  for (int64_t r = 0; r < tile.count; ++r) {
    if (scores[r] != scores[r]) continue;  // non-finite key: NaN
    if (scores[r] == 0.0f) continue;       // zero key: score 0
    scores[r] = careful_score(tile.row[r], rows.d, direction);
  }
}

// Tokens [first, last) of a head, one block of the sum: writes norms to `scores` and the block's sum to `total`. `run`
// is scratch of the same size as `total`.
template <class T>
void first_pass(const Rows<T>& rows, int64_t first, int64_t last, float* scores, float* total, float* run, int64_t size,
                bool normalize, float unit) {
  for (int64_t c = 0; c < size; ++c) total[c] = 0.0f;
  for (int64_t begin = first; begin < last; begin += kRun) {
    const int64_t end = last - begin < kRun ? last : begin + kRun;
    for (int64_t c = 0; c < size; ++c) run[c] = 0.0f;
    for (int64_t i = begin; i < end; i += VL) norms(rows, i, end, scores + i, run, normalize, unit);
    for (int64_t c = 0; c < size; ++c) total[c] += run[c];
  }
}

template <class T>
void second_pass(const Rows<T>& rows, int64_t first, int64_t last, float* scores, const float* direction) {
  for (int64_t end = last; end > first;) {
    const int64_t begin = first + (end - first - 1) / kBlock * kBlock;
    for (int64_t i = begin; i < end; i += VL) cosines(rows, i, end, direction, scores + i);
    end = begin;
  }
}

template <class T>
void only_pass(const Rows<T>& rows, int64_t first, int64_t last, float* scores, const float* direction) {
  for (int64_t i = first; i < last; i += VL) {
    norms(rows, i, last, scores + i, nullptr, true);
    cosines(rows, i, last, direction, scores + i);
  }
}

// direction = anchor / |anchor| in register order; zeros for a zero anchor.
template <class T>
void unit_direction(const float* anchor, int64_t d, float* direction, int64_t size) {
  double squares = 0;
  for (int64_t c = 0; c < d; ++c) squares += double(anchor[c]) * anchor[c];
  const double inverse = squares == 0 ? 0.0 : 1.0 / __builtin_sqrt(squares);
  for (int64_t i = 0; i < size; ++i) direction[i] = 0.0f;
  for (int64_t c = 0; c < d; ++c) direction[channel_slot<T>(c)] = static_cast<float>(anchor[c] * inverse);
}

template <class T>
struct Head {
  Rows<T> rows;        // the valid slots
  float* scores;       // of the valid slots
  float* anchor;       // [d], channels in order
  const float* given;  // [d] or null
};

template <class T>
Head<T> prepare_head(const AnchorCosineParams& p, int64_t index) {
  const int64_t b = index / p.heads, h = index % p.heads;
  const int64_t first = p.slots.first(b), count = p.slots.count(b);
  float* scores = p.scores + index * p.n;
  for (int64_t i = 0; i < first; ++i) scores[i] = __builtin_nanf("");
  for (int64_t i = first + count; i < p.n; ++i) scores[i] = __builtin_nanf("");
  float* anchor = p.anchor + index * p.d;
  const float* given = p.given_anchor ? p.given_anchor + index * p.d : nullptr;
  for (int64_t c = 0; c < p.d; ++c) anchor[c] = given ? given[c] : 0.0f;
  const Rows<T> rows{p.k.head(b, h).from(first), count, p.d, row_shape<T>(p.k.row_bytes)};
  return {rows, scores + first, anchor, given};
}

inline bool all_finite(const float* x, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= is_finite(x[i]);
  return finite;
}

// Computes the unit vector of a head's sum of keys. sum_of(unit) writes the sum of keys times `unit` to head.anchor.
template <class T, class SumOf>
void sum_and_direction(const Head<T>& head, float* direction, int64_t size, const SumOf& sum_of) {
  const int64_t d = head.rows.d;
  if (!head.given) sum_of(1.0f);
  const bool again = !head.given && !all_finite(head.anchor, d);
  if (again) sum_of(kScaledDown);
  unit_direction<T>(head.anchor, d, direction, size);
  for (int64_t c = 0; again && c < d; ++c) head.anchor[c] /= kScaledDown;  // may be infinite
}

// Whether to give each head to one thread, rather than to split each over all threads.
inline bool whole_heads(int64_t heads, int64_t bytes, int64_t workers) {
  constexpr int64_t kSharedCache = 32 << 20;  // typical last-level cache
  const bool balanced = heads % workers == 0 || heads >= 4 * workers;
  const bool only_one_fits = bytes < kSharedCache && bytes * workers > kSharedCache;
  return balanced && !only_one_fits;
}

template <class T>
void score_heads(const AnchorCosineParams& p, Call& call) {
  const int64_t size = row_shape<T>(p.k.row_bytes).registers() * kStep<T>;
  const int64_t heads = p.b * p.heads;
  // Rows of scratch for sums. Shared: one per block of a head. Per worker: a block's, a run's, and a head's in fp64.
  const Workers workers = workers_for(call, heads * p.n * p.k.row_bytes, 4 * size, (p.n + kBlock - 1) / kBlock * size);
  if (whole_heads(heads, p.n * p.k.row_bytes, workers.count)) {
    parallel_for(workers, workers.count, [&](int64_t worker) {
      float* const scratch = workers.workspace + worker * 4 * size;
      float *const block = scratch, *const run = scratch + size;
      double* const sum = reinterpret_cast<double*>(scratch + 2 * size);
      const Share mine = share(heads, worker, workers.count);
      for (int64_t index = mine.first; index < mine.last; ++index) {
        const Head<T> head = prepare_head<T>(p, index);
        sum_and_direction<T>(head, block, size, [&](float unit) {
          for (int64_t c = 0; c < size; ++c) sum[c] = 0;
          for (int64_t i = 0; i < head.rows.count; i += kBlock) {
            const int64_t end = head.rows.count - i < kBlock ? head.rows.count : i + kBlock;
            first_pass(head.rows, i, end, head.scores, block, run, size, p.normalize_anchor, unit);
            for (int64_t c = 0; c < size; ++c) sum[c] += block[c];
          }
          for (int64_t c = 0; c < p.d; ++c) head.anchor[c] = static_cast<float>(sum[channel_slot<T>(c)]);
        });
        (head.given ? only_pass<T> : second_pass<T>)(head.rows, 0, head.rows.count, head.scores, block);
      }
    });
    return;
  }
  for (int64_t index = 0; index < heads; ++index) {
    const Head<T> head = prepare_head<T>(p, index);
    const int64_t blocks = (head.rows.count + kBlock - 1) / kBlock;
    // Each worker takes a run of whole blocks, the same one in both passes.
    const auto tokens = [&](int64_t worker) {
      const Share mine = share(blocks, worker, workers.count);
      return Share{mine.first * kBlock, mine.last * kBlock < head.rows.count ? mine.last * kBlock : head.rows.count};
    };
    float *const sums = workers.workspace, *const direction = sums;
    sum_and_direction<T>(head, direction, size, [&](float unit) {
      parallel_for(workers, workers.count, [&](int64_t worker) {
        const Share mine = tokens(worker);
        float* const run = sums + (blocks + worker) * size;
        for (int64_t i = mine.first; i < mine.last; i += kBlock) {
          const int64_t end = mine.last - i < kBlock ? mine.last : i + kBlock;
          first_pass(head.rows, i, end, head.scores, sums + i / kBlock * size, run, size, p.normalize_anchor, unit);
        }
      });
      for (int64_t c = 0; c < p.d; ++c) {
        double sum = 0;
        for (int64_t block = 0; block < blocks; ++block) sum += sums[block * size + channel_slot<T>(c)];
        head.anchor[c] = static_cast<float>(sum);
      }
    });
    parallel_for(workers, workers.count, [&](int64_t worker) {
      const Share mine = tokens(worker);
      if (mine.first < mine.last)
        (head.given ? only_pass<T> : second_pass<T>)(head.rows, mine.first, mine.last, head.scores, direction);
    });
  }
}

}  // namespace

void anchor_cosine(const AnchorCosineParams& p, Call& call) {
  with_read_dtype(p.dtype, [&](auto type) { score_heads<decltype(type)>(p, call); });
}

}  // namespace kvops::KVOPS_ISA
