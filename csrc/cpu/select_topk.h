// Selects the slots to keep, on the CPU: exact, ascending, ties to the lower slot.
//
// Scores become unsigned keys of the same order (-0.0 equals 0.0, NaN is lowest). To find the k-th largest of a row:
//   1. Find its finite minimum and maximum.
//   2. Build a histogram over kBins equal steps between them; the k-th largest lies in one bin. (Bins by the key's bits
//      would be too uneven, because scores crowd into few exponents. Equal steps spread them, and since the mapping is
//      monotone, no score lands on the wrong side.)
//   3. Collect the keys of that bin, usually a handful. A radix select on them finds the threshold, and how many keys
//      equal to it are kept.
//   4. One pass writes the slots above the threshold and the first of the equal ones, in ascending order.
// So each score is read four times, three of them from the cache.
//
// Work is split over rows and segments. A single long row is cut into chunks that go through the steps together.
#include "../dispatch.h"
#include "../ops/select_topk.h"
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kBins = 2048;
constexpr int64_t kChunkFloats = kBins + 32;  // scratch: a histogram and its bookkeeping
constexpr int64_t kShort = 256;               // rows up to this length go straight to the radix select

inline uint32_t lane_bits(I mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < VL; ++i) bits |= (mask[i] & 1u) << i;
  return bits;
#endif
}

// Calls fn(i, x, live) over [first, last): VL scores x from slot i on; the bit mask `live` marks the lanes that exist.
template <class Fn>
inline void for_scores(const float* scores, int64_t first, int64_t last, const Fn& fn) {
  constexpr uint32_t kAll = VL == 32 ? ~0u : (1u << VL) - 1;
  int64_t i = first;
  for (; i + VL <= last; i += VL) fn(i, load(scores + i), kAll);
  if (i < last) fn(i, load_first(scores + i, last - i, __builtin_nanf("")), (1u << (last - i)) - 1);
}

// A part of a row, and the state of the steps above.
struct Chunk {
  int64_t first, last;
  float lo, hi;
  uint32_t* histogram;  // [kBins]
  uint32_t* keys;       // [last - first]: the keys in the bin that holds the threshold
  int64_t picked;
  int64_t above, equal;  // slots with a key above the threshold, and equal to it
};

inline void find_range(const float* scores, Chunk& chunk) {
  F low = splat(__builtin_inff()), high = splat(-__builtin_inff());
  for_scores(scores, chunk.first, chunk.last, [&](int64_t, F x, uint32_t) {
    const I finite = x - x == 0.0f;
    low = min(low, finite ? x : low);
    high = max(high, finite ? x : high);
  });
  chunk.lo = low[0];
  chunk.hi = high[0];
  for (int i = 1; i < VL; ++i) {
    chunk.lo = low[i] < chunk.lo ? low[i] : chunk.lo;
    chunk.hi = high[i] > chunk.hi ? high[i] : chunk.hi;
  }
}

// Equal steps from lo to hi. Infinite and far values are clamped and NaN goes to bin 0, which keeps the mapping
// monotone.
struct Binning {
  float lo, scale;
  I operator()(F x) const {
    const F step = (x - lo) * scale;
    return __builtin_convertvector(step > 0.0f ? min(step, splat(kBins - 1)) : F{}, I);
  }
};

inline void count_bins(const float* scores, const Chunk& chunk, Binning binning) {
  uint32_t second[kBins];  // alternating between two histograms: an increment need not wait for the previous one
  memset(chunk.histogram, 0, sizeof(second));
  memset(second, 0, sizeof(second));
  for_scores(scores, chunk.first, chunk.last, [&](int64_t, F x, uint32_t live) {
    const I bins = binning(x);
    int32_t bin[VL];
    memcpy(bin, &bins, VB);
    if (__builtin_expect(live + 1 == (VL == 32 ? 0u : 1u << VL), 1)) {
      for (int i = 0; i < VL; i += 2) {
        ++chunk.histogram[bin[i]];
        ++second[bin[i + 1]];
      }
    } else {
      for (; live; live &= live - 1) ++second[bin[__builtin_ctz(live)]];
    }
  });
  for (int i = 0; i < kBins; ++i) chunk.histogram[i] += second[i];
}

inline void pick_bin(const float* scores, Chunk& chunk, Binning binning, int32_t bin) {
  chunk.picked = 0;
  for_scores(scores, chunk.first, chunk.last, [&](int64_t, F x, uint32_t live) {
    uint32_t hits = lane_bits(binning(x) == bin) & live;
    if (!hits) return;
    const U keys = order_key(x);
    uint32_t key[VL];
    memcpy(key, &keys, VB);
    for (; hits; hits &= hits - 1) chunk.keys[chunk.picked++] = key[__builtin_ctz(hits)];
  });
}

inline void pick_all(const float* scores, Chunk& chunk) {
  chunk.picked = chunk.last - chunk.first;
  for_scores(scores, chunk.first, chunk.last, [&](int64_t i, F x, uint32_t) {
    const U keys = order_key(x);
    const int64_t rest = chunk.last - i;
    memcpy(chunk.keys + (i - chunk.first), &keys, 4 * (rest < VL ? rest : VL));
  });
}

struct Threshold {
  uint32_t key;
  int64_t equal;  // how many of the keys equal to it are kept
};

// The rank-th largest (from 1) of `count` keys. Reorders the keys.
inline Threshold radix_select(uint32_t* keys, int64_t count, int64_t rank) {
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint32_t histogram[256] = {};
    for (int64_t i = 0; i < count; ++i) ++histogram[keys[i] >> shift & 255];
    uint32_t digit = 255;
    for (; histogram[digit] < rank; --digit) rank -= histogram[digit];
    const int64_t inside = histogram[digit];
    if (shift == 0) return {(keys[0] & ~255u) | digit, rank};
    int64_t kept = 0;
    for (int64_t i = 0; kept < inside; ++i) {
      keys[kept] = keys[i];
      kept += (keys[i] >> shift & 255) == digit;
    }
    count = inside;
  }
  return {};
}

inline void count_above(const float* scores, Chunk& chunk, uint32_t threshold) {
  chunk.above = chunk.equal = 0;
  for_scores(scores, chunk.first, chunk.last, [&](int64_t, F x, uint32_t live) {
    const U keys = order_key(x);
    chunk.above += __builtin_popcount(lane_bits(keys > threshold) & live);
    chunk.equal += __builtin_popcount(lane_bits(keys == threshold) & live);
  });
}

// Appends base + i for each set bit i of `lanes`, ascending.
inline int64_t* append(int64_t* out, int64_t base, uint32_t lanes) {
#if defined(__AVX512F__)
  const __m512i step = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  for (int half = 0; half < 2; ++half) {
    const __mmask8 mask = static_cast<__mmask8>(lanes >> (8 * half));
    const int count = __builtin_popcount(mask);
    const __m512i slots = _mm512_add_epi64(_mm512_set1_epi64(base + 8 * half), step);
    _mm512_mask_storeu_epi64(out, static_cast<__mmask8>((1u << count) - 1), _mm512_maskz_compress_epi64(mask, slots));
    out += count;
  }
#else
  for (; lanes; lanes &= lanes - 1) *out++ = base + __builtin_ctz(lanes);
#endif
  return out;
}

// Writes the chunk's slots above the threshold, and its first `equal` slots at the threshold.
inline void write_kept(const float* scores, const Chunk& chunk, uint32_t threshold, int64_t equal, int64_t base,
                       int64_t* out) {
  for_scores(scores, chunk.first, chunk.last, [&](int64_t i, F x, uint32_t live) {
    const U keys = order_key(x);
    uint32_t kept = lane_bits(keys > threshold) & live;
    uint32_t ties = lane_bits(keys == threshold) & live;
    for (; ties && equal > 0; ties &= ties - 1, --equal) kept |= ties & -ties;
    if (kept) out = append(out, base + i, kept);
  });
}

inline void write_range(int64_t* out, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = first + i;
}

// Writes base + the k best of n scores to `out`, ascending, working in `chunks` parts. scratch: kChunkFloats per chunk,
// then n. run(fn) calls fn(chunk index) for all chunks.
template <class Run>
void select_best(const float* scores, int64_t n, int64_t k, int64_t base, int64_t* out, int64_t chunks, float* scratch,
                 const Run& run) {
  if (k <= 0) return;
  if (k >= n) return write_range(out, base, n);
  Chunk* parts = reinterpret_cast<Chunk*>(scratch);
  uint32_t* histograms = reinterpret_cast<uint32_t*>(scratch + chunks * (sizeof(Chunk) / 4));
  uint32_t* keys = histograms + chunks * kBins;
  for (int64_t c = 0; c < chunks; ++c) {
    const Share part = share(n, c, chunks);
    parts[c] = {part.first, part.last, 0, 0, histograms + c * kBins, keys + part.first, 0, 0, 0};
  }
  int64_t rank = k;
  if (n <= kShort && chunks == 1) {
    pick_all(scores, parts[0]);
  } else {
    run([&](int64_t c) { find_range(scores, parts[c]); });
    float lo = parts[0].lo, hi = parts[0].hi;
    for (int64_t c = 1; c < chunks; ++c) {
      lo = parts[c].lo < lo ? parts[c].lo : lo;
      hi = parts[c].hi > hi ? parts[c].hi : hi;
    }
    const Binning binning = lo < hi ? Binning{lo, kBins / (hi - lo)} : Binning{0.0f, 0.0f};
    run([&](int64_t c) { count_bins(scores, parts[c], binning); });
    int32_t bin = kBins;
    for (int64_t inside = 0;; rank -= inside) {
      --bin;
      inside = 0;
      for (int64_t c = 0; c < chunks; ++c) inside += parts[c].histogram[bin];
      if (inside >= rank) break;
    }
    run([&](int64_t c) { pick_bin(scores, parts[c], binning, bin); });
  }
  int64_t picked = parts[0].picked;
  for (int64_t c = 1; c < chunks; ++c) {
    memmove(keys + picked, parts[c].keys, 4 * parts[c].picked);
    picked += parts[c].picked;
  }
  const Threshold threshold = radix_select(keys, picked, rank);
  if (chunks == 1) return write_kept(scores, parts[0], threshold.key, threshold.equal, base, out);
  run([&](int64_t c) { count_above(scores, parts[c], threshold.key); });
  run([&](int64_t c) {
    int64_t before = 0, equal_left = threshold.equal;
    for (int64_t earlier = 0; earlier < c; ++earlier) {
      const int64_t equal = parts[earlier].equal < equal_left ? parts[earlier].equal : equal_left;
      before += parts[earlier].above + equal;
      equal_left -= equal;
    }
    write_kept(scores, parts[c], threshold.key, equal_left, base, out + before);
  });
}

// Fills a row's entries beyond `kept` with the lowest invalid slots, keeping the row ascending, and with -1 when none
// are left.
inline void finish_row(const SelectTopkParams& p, int64_t b, int64_t* row, int64_t kept) {
  const int64_t first = p.slots.first(b), end = first + p.slots.count(b);
  const int64_t missing = p.fill_invalid ? p.width - kept : 0;
  const int64_t below = missing < first ? missing : first;
  const int64_t beyond = missing - below < p.n - end ? missing - below : p.n - end;
  if (below) memmove(row + below, row, 8 * kept);
  write_range(row, 0, below);
  write_range(row + below + kept, end, beyond);
  for (int64_t i = below + kept + beyond; i < p.width; ++i) row[i] = -1;
}

}  // namespace

void select_topk(const SelectTopkParams& p, Call& call) {
  const int64_t rows = p.b * p.heads;
  const bool by_segment = p.segments >= 0;
  // A work item is a row or a segment; the first item of a row also writes the slots kept regardless of score.
  const int64_t per_row = by_segment ? (p.segments > 0 ? p.segments : 1) : 1;
  const auto unit = [&](int64_t index, int64_t chunks, float* scratch, const auto& run) {
    const int64_t row = index / per_row, b = row / p.heads, h = row % p.heads, s = index % per_row;
    const int64_t first = p.slots.first(b), count = p.slots.count(b);
    const float* scores = p.scores + b * p.stride_b + h * p.stride_h;
    int64_t* out = p.indices + row * p.width;
    if (by_segment) {
      const int64_t segments = num_segments(count, p.sinks, p.lag);
      const int64_t head = count < p.sinks ? count : p.sinks;
      if (s < segments)
        select_best(scores + s * p.stride_s, p.lag, p.k, first + p.sinks + s * p.lag, out + p.sinks + s * p.k, chunks,
                    scratch, run);
      if (s == 0) {
        write_range(out, first, head);
        const int64_t done = head + segments * p.lag;
        write_range(out + head + segments * p.k, first + done, count - done);
      }
      return;
    }
    const int64_t budget = p.budgets ? p.budgets[row] : p.k;
    if (count <= budget) return write_range(out, first, count);
    write_range(out, first, p.sinks);
    select_best(scores + first + p.sinks, count - p.sinks - p.window, budget - p.sinks - p.window, first + p.sinks,
                out + p.sinks, chunks, scratch, run);
    write_range(out + budget - p.window, first + count - p.window, p.window);
  };
  const int64_t units = rows * per_row, keys = ((by_segment ? p.lag : p.n) + 15) / 16 * 16;
  const int64_t bytes = 32 * rows * p.n;  // one score costs about as much as reading 32 bytes
  // Either each worker takes its own items, or all share one item after the other.
  const bool own = units >= threads_for(call, bytes);
  const int64_t each = kChunkFloats + (own ? keys : 0);
  const Workers workers = workers_for(call, bytes, each, own ? 0 : keys);
  if (own) {
    parallel_for(workers, workers.count, [&](int64_t worker) {
      float* scratch = workers.workspace + worker * each;
      const Share mine = share(units, worker, workers.count);
      for (int64_t i = mine.first; i < mine.last; ++i) unit(i, 1, scratch, [](const auto& fn) { fn(0); });
    });
  } else {
    for (int64_t i = 0; i < units; ++i)
      unit(i, workers.count, workers.workspace, [&](const auto& fn) { parallel_for(workers, workers.count, fn); });
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / p.heads, count = p.slots.count(b);
    const int64_t budget = p.budgets ? p.budgets[row] : p.k;
    const int64_t kept = by_segment ? kept_length(count, p.sinks, p.lag, p.k) : count < budget ? count : budget;
    if (kept < p.width) finish_row(p, b, p.indices + row * p.width, kept);
  }
}

}  // namespace kvops::KVOPS_ISA
