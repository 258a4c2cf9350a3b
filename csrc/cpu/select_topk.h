// Selects the slots to keep, on the CPU: exact, ascending, ties to the lower slot.
//
// Scores become unsigned keys of the same order (-0.0 equals 0.0, NaN is lowest). To find the k-th largest of a row:
//   1. Guess two keys that it probably lies between, from a sample of the row (Floyd and Rivest, Communications of the
//      ACM 18(3), 1975).
//   2. In one pass, count the keys above both and collect those between: a tenth to a third of the row. If the k-th
//      largest is not among them, repeat this with bounds that have it among them.
//   3. Narrow those down likewise, until they are few. Counting gives the threshold, and how many keys equal to it are
//      kept.
//   4. One pass writes the slots above the threshold and the first of the equal ones, in ascending order.
// So each score is read twice, the second time from the cache; if threads share a row, three times. The guess decides
// the time alone, not the result.
//
// Work is split over rows and segments. A single long row is cut into chunks that go through the steps together.
#include "../dispatch.h"
#include "../ops/select_topk.h"
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kFew = 256;             // keys to find the threshold among by counting
constexpr int kSample = 256;          // keys at most
constexpr int64_t kChunkFloats = 32;  // scratch for the bookkeeping of a chunk

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

// Appends the keys of these lanes.
inline uint32_t* append_keys(uint32_t* out, U keys, uint32_t lanes) {
  const int count = __builtin_popcount(lanes);
#if defined(__AVX512F__)
  _mm512_mask_storeu_epi32(out, static_cast<__mmask16>((1u << count) - 1),
                           _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), (__m512i)keys));
#else
  for (int i = 0; lanes; lanes &= lanes - 1) out[i++] = keys[__builtin_ctz(lanes)];
#endif
  return out + count;
}

// Keys from low to high.
struct Band {
  uint32_t low = 0, high = ~0u;
};

// A part of a row, and the state of the steps above.
struct Chunk {
  int64_t first, last;
  uint32_t* keys;                // [last - first]: those in the band
  int64_t over = 0, picked = 0;  // keys above the band, and in it
  int64_t above = 0, equal = 0;  // slots with a key above the threshold, and equal to it
};
static_assert(sizeof(Chunk) <= 4 * kChunkFloats);

inline void pick_keys(const float* scores, Chunk& chunk, Band band) {
  uint32_t* out = chunk.keys;
  int64_t over = 0;
  for_scores(scores, chunk.first, chunk.last, [&](int64_t, F x, uint32_t live) {
    const U keys = order_key(x);
    over += __builtin_popcount(lane_bits(keys > band.high) & live);
    out = append_keys(out, keys, lane_bits((keys >= band.low) & (keys <= band.high)) & live);
  });
  chunk.over = over;
  chunk.picked = out - chunk.keys;
}

struct Threshold {
  uint32_t key;
  int64_t equal;  // how many of the keys equal to it are kept
};

// The rank-th largest (from 1) of a few keys: the one with fewer than `rank` keys above it and enough equal to it. Keys
// that an earlier one has ruled out need no counting. Writes zeros, the lowest key, up to a multiple of VL.
inline Threshold count_select(uint32_t* keys, int64_t count, int64_t rank) {
  for (int64_t i = count; i % VL; ++i) keys[i] = 0;
  uint64_t low = 0, high = uint64_t{1} << 32;  // low <= threshold < high
  for (int64_t i = 0;; ++i) {
    if (keys[i] < low || keys[i] >= high) continue;
    int64_t above = 0, equal = 0;
    for (int64_t j = 0; j < count; j += VL) {
      U others;
      memcpy(&others, keys + j, VB);
      above += __builtin_popcount(lane_bits(others > keys[i]));
      equal += __builtin_popcount(lane_bits(others == keys[i]));
    }
    if (above >= rank)
      low = uint64_t{keys[i]} + 1;
    else if (above + equal < rank)
      high = keys[i];
    else
      return {keys[i], rank - above};
  }
}

inline void to_keys(float* scores, int64_t count) {  // a multiple of VL, in place
  for (int64_t i = 0; i < count; i += VL) {
    const U keys = order_key(load(scores + i));
    memcpy(scores + i, &keys, VB);
  }
}
inline void to_keys(uint32_t*, int64_t) {}

// A band that probably contains the rank-th largest of n scores or keys.
template <class T>
inline Band guess_band(const T* from, int64_t n, int64_t rank) {
  const int64_t m = n >= 32768 ? kSample : n >= 4096 ? kSample / 2 : kSample / 4;
  T sample[kSample];
  for (int64_t i = 0; i < m; ++i)  // steps of the golden ratio: even, and out of step with any period
    sample[i] = from[uint64_t{static_cast<uint32_t>(i) * 2654435769u} * static_cast<uint64_t>(n) >> 32];
  to_keys(sample, m);
  uint32_t keys[kSample];
  memcpy(keys, sample, 4 * m);
  // About m rank / n of the sample are at least as large, with a standard deviation of sqrt(m rank / n (1 - rank / n)).
  const float share = static_cast<float>(rank) / static_cast<float>(n), at = share * static_cast<float>(m);
  const float margin = 2.5f * __builtin_sqrtf(at * (1 - share)) + 1;
  Band band;
  if (at > margin) band.high = count_select(keys, m, static_cast<int64_t>(at - margin) + 1).key;
  if (at + margin < static_cast<float>(m)) band.low = count_select(keys, m, static_cast<int64_t>(at + margin) + 1).key;
  return band;
}

// Corrects a band that `over` of the keys are above and `inside` are in, if the rank-th largest is not in it. Returns
// whether it had to.
inline bool corrected(Band& band, int64_t over, int64_t inside, int64_t rank) {
  if (over < rank && rank <= over + inside) return false;
  band = over < rank ? Band{0, band.low - 1} : Band{band.high + 1, ~0u};
  return true;
}

// Keeps those of `count` keys that are in the band, in their order. Returns how many.
inline int64_t keep_band(uint32_t* keys, int64_t count, Band band) {
  uint32_t* out = keys;
  int64_t i = 0;
  for (; i + VL <= count; i += VL) {
    U x;
    memcpy(&x, keys + i, VB);
    out = append_keys(out, x, lane_bits((x >= band.low) & (x <= band.high)));
  }
  for (; i < count; ++i)
    if (const uint32_t x = keys[i]; band.low <= x && x <= band.high) *out++ = x;
  return out - keys;
}
inline int64_t count_over(const uint32_t* keys, int64_t count, uint32_t high) {
  int64_t over = 0;
  for (int64_t i = 0; i < count; ++i) over += keys[i] > high;
  return over;
}

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

// The same, narrowing the keys down first.
inline Threshold select_key(uint32_t* keys, int64_t count, int64_t rank) {
  for (int rounds = 0; count > kFew; ++rounds) {
    if (rounds == 8) return radix_select(keys, count, rank);  // no sample helps
    Band band = guess_band(keys, count, rank);
    int64_t over = count_over(keys, count, band.high);
    const int64_t from_low = band.low ? count_over(keys, count, band.low - 1) : count;  // the band and above
    if (corrected(band, over, from_low - over, rank)) over = over < rank ? from_low : 0;
    if (band.low == band.high) return {band.low, rank - over};
    if (over == 0 && from_low == count) {  // it has them all: of many equal ones, perhaps. Cut off one of its ends.
      const bool lower = band.low || band.high == ~0u;
      const uint32_t end = lower ? band.low : band.high;
      const int64_t above = count_over(keys, count, end), from = end ? count_over(keys, count, end - 1) : count;
      if (above < rank && rank <= from) return {end, rank - above};
      over = lower ? 0 : from - above;
      band = lower ? Band{end + 1, band.high} : Band{band.low, end - 1};
    }
    count = keep_band(keys, count, band);
    rank -= over;
  }
  return count_select(keys, count, rank);
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
    if (const int count = __builtin_popcount(ties); count <= equal) {
      kept |= ties;
      equal -= count;
    } else {
      for (; equal > 0; ties &= ties - 1, --equal) kept |= ties & -ties;
    }
    if (kept) out = append(out, base + i, kept);
  });
}

inline void write_range(int64_t* out, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = first + i;
}

// Writes base + the k best of n scores to `out`, ascending, working in `chunks` parts. scratch: kChunkFloats per chunk,
// then n, in whole vectors. run(fn) calls fn(chunk index) for all chunks.
template <class Run>
void select_best(const float* scores, int64_t n, int64_t k, int64_t base, int64_t* out, int64_t chunks, float* scratch,
                 const Run& run) {
  if (k <= 0) return;
  if (k >= n) return write_range(out, base, n);
  Chunk* parts = reinterpret_cast<Chunk*>(scratch);
  uint32_t* keys = reinterpret_cast<uint32_t*>(scratch + chunks * kChunkFloats);
  for (int64_t c = 0; c < chunks; ++c) {
    const Share part = share(n, c, chunks);
    parts[c] = {part.first, part.last, keys + part.first};
  }
  Band band;
  if (n > kFew) band = guess_band(scores, n, k);
  int64_t over, picked;
  do {
    run([&](int64_t c) { pick_keys(scores, parts[c], band); });
    over = picked = 0;
    for (int64_t c = 0; c < chunks; ++c) over += parts[c].over, picked += parts[c].picked;
  } while (corrected(band, over, picked, k));
  for (int64_t c = 1, to = parts[0].picked; c < chunks; to += parts[c++].picked)
    memmove(keys + to, parts[c].keys, 4 * parts[c].picked);
  const Threshold threshold = select_key(keys, picked, k - over);
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
