// LagKV scores on the CPU.
//
//   N[t, c] = (X[t, c] - lo_c) / (hi_c - lo_c),  lo, hi = min, max over t of the NEXT partition Y
//   score   = softmax_t(std_c N_K) + v_weight * softmax_t(std_c N_V)
//
// Bytes that must move: K and V once. Each partition is needed twice: as the subject X, and as the reference Y of the
// one before it. So each head goes through its partitions BACKWARD. When X is read, the range of Y is already known,
// and the same loaded registers give X's statistics against Y and X's own range for the partition before. That is one
// read from memory, one load into registers, and 7 vector instructions per register of floats.
//
// A tile is R rows. For each register of channels, its lo, 1/range, min and max stay in registers while the R rows
// pass. The R sums and R sums of squares over channels stay in registers for the whole tile and are reduced together
// (sum_lanes). z = N - 1/2 keeps the one-pass variance accurate: about zero, no digits cancel.
//
// Rare cases add no cost to the common path. A non-finite value makes the variance of its own row non-finite; a row far
// outside the reference's range has a mean that dwarfs its variance. One compare per tile finds both. `careful_tile`
// then recomputes the tile, and also marks the channels to leave out of the next reference.
//
// From memory, fp32 takes 1.1 times as long as reading the same bytes, bf16 1.8 times (partitions of 1024 tokens, two
// threads). For bf16 in the cache, the instructions take as long as reading the bytes from memory, and the two overlap
// only in part.
//
// Work is split over (batch, head) and, if these are few, over runs of partitions (one extra partition read per run).
#include "../dispatch.h"
#include "../ops/lag_score.h"
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int R = VL / 2;  // rows per tile: their R sums and R sums of squares fill one vector
constexpr int64_t kAheadRows = 4 * R;

// Per channel, in register order. `half` is 1/2, or 0 in the unused lanes of the last register. `inverse` is 1/range
// (possibly encoded as kNarrow), or 0 for a channel without a usable range.
struct Channels {
  float *lo, *inverse, *half, *min, *max, *poison;
  int64_t size;  // floats in each: a multiple of VL

  static int64_t floats(int64_t size) { return 6 * size; }
  Channels(float* memory, int64_t size_) : size(size_) {
    float** arrays[] = {&lo, &inverse, &half, &min, &max, &poison};
    for (float** array : arrays) {
      *array = memory;
      memory += size;
    }
  }
  template <class T>
  void start(int64_t d) {
    for (int64_t i = 0; i < size; ++i) half[i] = 0.0f;
    for (int64_t c = 0; c < d; ++c) half[channel_slot<T>(c)] = 0.5f;
    reset_range();
  }
  void reset_range() {
    for (int64_t i = 0; i < size; i += VL) {
      store(min + i, splat(__builtin_inff()));
      store(max + i, splat(-__builtin_inff()));
      store(poison + i, F{});
    }
  }
  // Makes the range just gathered the reference. A channel whose range is zero or non-finite contributes N = 0.
  void use_range() {
    for (int64_t i = 0; i < size; i += VL) {
      const F low = load(min + i), range = load(max + i) - low, inv = 1.0f / range;
      const I usable = (range > 0.0f) & (inv > 0.0f) & (load(poison + i) == 0.0f);
      const F finite = inv < __builtin_inff() ? inv : (F)((U)range | kNarrow);
      store(lo + i, usable ? low : F{});
      store(inverse + i, usable ? finite : F{});
    }
    reset_range();
  }
};

// Turns R sums and R sums of squares into the rows' unbiased variances over d channels. Returns false if a row needs
// the careful path: it is not finite, or its mean is so large compared to its variance that the difference has lost
// digits.
inline bool variances(F* sums, int64_t d, float* variance, int64_t count) {
  float both[VL], s[VL] = {}, q[VL];
  store(both, sum_lanes(sums));
  memcpy(s, both, 4 * R);
  store(q, splat(1.0f));  // the lanes beyond R pass the test below
  memcpy(q, both + R, 4 * R);
  const F sum = load(s), squares = load(q);
  const F deviation = squares - sum * sum * (1.0f / d);
  store_first(variance, deviation * (1.0f / (d - 1)), count);
  const I sound = deviation * 8.0f > squares;  // false for NaN and infinities too
  return !any_nan(sound ? F{} : splat(__builtin_nanf("")));
}

// `count` rows, one element at a time and in double, including channels where the row is not finite.
template <class T, bool Range>
__attribute__((noinline)) void careful_tile(const Rows<T>& rows, int64_t first, int64_t count, Channels& channels,
                                            float* variance) {
  for (int64_t r = 0; r < count; ++r) {
    const T* row = rows.row(first + r);
    double s = 0, q = 0;
    for (int64_t c = 0; c < rows.d; ++c) {
      const int64_t slot = channel_slot<T>(c);
      const float x = to_float(row[c]);
      if (Range && !is_finite(x)) channels.poison[slot] = __builtin_nanf("");
      double z = -0.5;
      const float inverse = channels.inverse[slot];
      if (inverse != 0.0f) z = (double(x) - channels.lo[slot]) * inverse_range(inverse) - 0.5;
      s += z;
      q += z * z;
    }
    const double var = (q - s * s / rows.d) / (rows.d - 1);
    variance[r] = var < 0 ? 0.0f : static_cast<float>(var);
  }
}

// Rows [first, first + count): their variances over channels against the reference (Score), and their range (Range).
template <class T, bool Score, bool Range>
inline void sweep(const Rows<T>& rows, int64_t first, int64_t count, Channels& channels, float* variance) {
  constexpr int W = kVecs<T>;
  for (int64_t i = 0; i < count; i += R) {
    const int64_t live = count - i < R ? count - i : R;
    const T* row[R];
    rows.template take<R>(first + i, first + count, row);
    // The partition before this one comes next, after the other tensor's. That leaves enough time for a prefetch into
    // L2.
    int64_t far[R];
    rows.template ahead<R>(first + i, i + kAheadRows < count ? kAheadRows : kAheadRows - 2 * count, row, far);
    F sums[VL] = {};
    for_registers<T>(rows.shape, [&](int64_t c, auto&& load_row) {
      F lo[W], inverse[W], half[W], low[W], high[W], poison[W];
      for (int j = 0; j < W; ++j) {
        const int64_t at = (c * W + j) * VL;
        if constexpr (Score) lo[j] = load(channels.lo + at);
        if constexpr (Score) inverse[j] = load(channels.inverse + at);
        if constexpr (Score) half[j] = load(channels.half + at);
        if constexpr (Range) low[j] = load(channels.min + at);
        if constexpr (Range) high[j] = load(channels.max + at);
        if constexpr (Range && !Score) poison[j] = load(channels.poison + at);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        F x[W];
        prefetch<2>(row[r], c, far[r]);
        load_row(row[r], x);
        for (int j = 0; j < W; ++j) {
          if constexpr (Score) {
            const F z = (x[j] - lo[j]) * inverse[j] - half[j];
            sums[r] += z;
            sums[R + r] += z * z;
          }
          if constexpr (Range) low[j] = min(low[j], x[j]);
          if constexpr (Range) high[j] = max(high[j], x[j]);
          if constexpr (Range && !Score) poison[j] += x[j] * 0.0f;
        }
      }
      for (int j = 0; j < W; ++j) {
        const int64_t at = (c * W + j) * VL;
        if constexpr (Range) store(channels.min + at, low[j]);
        if constexpr (Range) store(channels.max + at, high[j]);
        if constexpr (Range && !Score) store(channels.poison + at, poison[j]);
      }
    });
    if constexpr (Score) {
      if (__builtin_expect(!variances(sums, rows.d, variance + i, live), 0))
        careful_tile<T, Range>(rows, first + i, live, channels, variance + i);
    }
  }
}

// Turns variance [n] into weight * softmax of its square root, over the finite entries; the others become NaN.
inline void softmax_of_std(float* x, int64_t n, float weight) {
  const F lowest = splat(-__builtin_inff());
  F top = lowest;
  for (int64_t i = 0; i < n; i += VL) {
    const int64_t live = n - i < VL ? n - i : VL;
    const F std = sqrt(load_first(x + i, live, 0.0f));
    store_first(x + i, std, live);
    top = max(top, std < __builtin_inff() ? std : lowest);  // NaN compares false
  }
  float max_std = 0.0f;
  for (int i = 0; i < VL; ++i) max_std = top[i] > max_std ? top[i] : max_std;
  double total = 0;
  constexpr int64_t kBlock = 1024;  // fixed-size blocks keep the sum accurate for partitions of any length
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t end = n - start < kBlock ? n : start + kBlock;
    F sums = {};
    for (int64_t i = start; i < end; i += VL) {
      const int64_t live = end - i < VL ? end - i : VL;
      const F std = load_first(x + i, live, -__builtin_inff());
      const I finite = std - std == 0.0f;
      const F e = exp(std - max_std);
      sums += finite ? e : F{};
      store_first(x + i, finite ? e : splat(__builtin_nanf("")), live);
    }
    total += sum(sums);
  }
  const float scale = static_cast<float>(weight / total);
  for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

// Scores segments [first, last) of one head, backward.
template <class T>
void score_run(const LagScoreParams& p, const Rows<T>* kv, float* scores, int64_t first, int64_t last,
               Channels* channels, float* v_scores) {
  const int64_t L = p.lag;
  for (int z = 0; z < 2; ++z) {
    channels[z].template start<T>(kv[z].d);
    if (p.self_reference) continue;
    sweep<T, false, true>(kv[z], last * L, L, channels[z], nullptr);
    channels[z].use_range();
  }
  for (int64_t s = last - 1; s >= first; --s) {
    float* out[2] = {scores + s * L, v_scores};
    for (int z = 0; z < 2; ++z) {
      if (p.self_reference) {
        sweep<T, false, true>(kv[z], s * L, L, channels[z], nullptr);
        channels[z].use_range();
      }
      if (p.self_reference || s == first) {
        sweep<T, true, false>(kv[z], s * L, L, channels[z], out[z]);
      } else {
        sweep<T, true, true>(kv[z], s * L, L, channels[z], out[z]);
        channels[z].use_range();
      }
      softmax_of_std(out[z], L, z ? p.v_weight : 1.0f);
    }
    for (int64_t t = 0; t < L; ++t) out[0][t] += out[1][t];
  }
}

// Floats of scratch per worker: 6 per channel of K and of V (rows rounded up to a register), and one partition of V's
// scores.
inline int64_t scratch_of(const LagScoreParams& p) {
  return 6 * ((p.d + 31) / 32 + (p.dv + 31) / 32) * 32 + (p.lag + 15) / 16 * 16;
}

template <class T>
void score_heads(const LagScoreParams& p, const Workers& workers) {
  const int64_t heads = p.b * p.heads;
  const int64_t runs = heads >= workers.count ? 1 : (4 * workers.count + heads - 1) / heads;  // per head, at most
  parallel_for(workers, workers.count, [&](int64_t worker) {
    float* memory = workers.workspace + worker * scratch_of(p);
    const RowShape shapes[2] = {row_shape<T>(p.k.row_bytes), row_shape<T>(p.v.row_bytes)};
    Channels channels[2] = {
        {memory, shapes[0].registers() * kStep<T>},
        {memory + Channels::floats(shapes[0].registers() * kStep<T>), shapes[1].registers() * kStep<T>}};
    float* v_scores = memory + Channels::floats(channels[0].size + channels[1].size);
    const Share units = share(heads * runs, worker, workers.count);
    for (int64_t unit = units.first; unit < units.last; ++unit) {
      const int64_t b = unit / runs / p.heads, h = unit / runs % p.heads;
      const int64_t segments = num_segments(p.slots.count(b), p.prefix, p.lag);
      float* scores = p.scores + (b * p.heads + h) * p.segments * p.lag;
      if (unit % runs == 0)
        for (int64_t i = segments * p.lag; i < p.segments * p.lag; ++i) scores[i] = __builtin_nanf("");
      const Share run = share(segments, unit % runs, runs);
      if (run.first == run.last) continue;
      const int64_t grid = p.slots.first(b) + p.prefix, tokens = p.slots.count(b) - p.prefix;
      const Rows<T> kv[2] = {{p.k.head(b, h).from(grid), tokens, p.d, shapes[0]},
                             {p.v.head(b, h).from(grid), tokens, p.dv, shapes[1]}};
      score_run(p, kv, scores, run.first, run.last, channels, v_scores);
    }
  });
}

}  // namespace

void lag_score(const LagScoreParams& p, Call& call) {
  const int64_t bytes = p.b * p.heads * p.segments * p.lag * (p.k.row_bytes + p.v.row_bytes);
  const Workers workers = workers_for(call, bytes, scratch_of(p));
  with_read_dtype(p.dtype, [&](auto type) { score_heads<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
