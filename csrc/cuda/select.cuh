// Exact selection of the largest scores: ordered keys, the threshold digit by digit, and the compaction.
//
// Blocks have kSelectThreads threads. Counts are int32: a row has fewer than 2^31 slots (check_valid_slots).
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

constexpr int kSelectThreads = 512, kSelectWarps = kSelectThreads / 32;
constexpr int kScoresAhead = 4;  // 16-byte loads that a thread has in flight

// A score as an unsigned number of the same order: NaN is 1, then -inf, then by value, with -0.0 equal to 0.0. 0 means
// no score and loses against everything, so positions past a row's end need no special treatment.
__device__ inline unsigned order_key(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0.0 becomes 0.0
  return x == x ? bits ^ (bits >> 31 ? ~0u : 1u << 31) : 1u;
}

// A part of a run of n scores, cut at 16-byte boundaries of memory into pieces of four, so that loads are wide for any
// alignment. Piece i holds score 4 * i - shift and the three after it; the first and last pieces may be incomplete.
struct Pieces {
  const float* scores;
  int n, shift;     // shift: floats from the 16-byte boundary at or before the first score to that score
  int first, last;  // the part's pieces

  __device__ static Pieces of(const float* scores, int n) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(scores) / 4 % 4);
    return {scores, n, shift, 0, static_cast<int>((static_cast<unsigned>(n) + shift + 3) / 4)};
  }
  // Part `index` of `count` equal ones, in whole steps of the block. The last ones may be empty.
  __device__ Pieces part(int index, int count) const {
    const int step = count * kSelectThreads, size = (last + step - 1) / step * kSelectThreads;
    Pieces x = *this;
    x.first = min(index * size, last);
    x.last = min((index + 1) * size, last);
    return x;
  }

  // The slot of the piece's first score. Negative values wrap around, to where no score is.
  __device__ unsigned slot(int piece) const { return 4u * piece - shift; }
  __device__ bool whole(int piece) const {
    return piece < last && 4u * piece >= static_cast<unsigned>(shift) && slot(piece) + 4 <= static_cast<unsigned>(n);
  }
  // The scores of a whole piece; keys() fetches the scores of incomplete ones.
  __device__ float4 load(int piece) const {
    return whole(piece) ? __ldg(reinterpret_cast<const float4*>(scores + slot(piece))) : float4{};
  }
  __device__ void keys(int piece, float4 x, unsigned (&key)[4]) const {
    if (whole(piece)) {
      key[0] = order_key(x.x);
      key[1] = order_key(x.y);
      key[2] = order_key(x.z);
      key[3] = order_key(x.w);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned i = slot(piece) + j;
      key[j] = piece < last && i < static_cast<unsigned>(n) ? order_key(__ldg(scores + i)) : 0u;
    }
  }
};

// Calls fn(first slot, four keys) for every piece, in ascending order over the block: the piece after a thread's
// belongs to the next thread. All threads make the same number of calls; past the last piece, the keys are 0.
template <class Fn>
__device__ inline void for_pieces(const Pieces& x, const Fn& fn) {
  for (int base = x.first; base < x.last; base += kScoresAhead * kSelectThreads) {
    float4 loaded[kScoresAhead];
#pragma unroll
    for (int u = 0; u < kScoresAhead; ++u) loaded[u] = x.load(base + u * kSelectThreads + threadIdx.x);
#pragma unroll
    for (int u = 0; u < kScoresAhead; ++u) {
      if (base + u * kSelectThreads >= x.last) break;
      const int piece = base + u * kSelectThreads + threadIdx.x;
      unsigned key[4];
      x.keys(piece, loaded[u], key);
      fn(x.slot(piece), key);
    }
  }
}

// Keys have three digits, of 11, 11 and 10 bits. A histogram has kBins counts, four per thread of the block.
constexpr int kDigits = 3, kBins = 2048, kLastBins = 1024;
static_assert(kBins == 4 * kSelectThreads);

struct Digit {
  int shift;
  unsigned bins;

  __device__ explicit Digit(int index)
      : shift(index == 0   ? 21
              : index == 1 ? 10
                           : 0),
        bins(index < 2 ? kBins : kLastBins) {}
};

// The state of the search for the wanted key: its leading digits (the rest is 0), and its rank (from 1) among the keys
// that share them. After the last digit, prefix is the threshold, and rank is how many of the keys equal to it are
// kept.
struct Search {
  unsigned prefix;
  int rank;
};

// The sum of x over the threads after this one. Contains one barrier; another must pass before `totals` is reused.
__device__ inline int sum_of_higher_threads(int x, int* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_down_sync(kWarp, sum, step);
    if (lane + step < 32) sum += other;
  }
  if (lane == 0) totals[warp] = sum;
  __syncthreads();
#pragma unroll
  for (int w = 1; w < kSelectWarps; ++w)
    if (w > warp) sum += totals[w];
  return sum - x;
}

// Advances by one digit. `counts` are the thread's four bins of the keys that share search's prefix. Contains two
// barriers.
__device__ inline Search narrow(Search search, int4 counts, Digit digit) {
  __shared__ int totals[kSelectWarps];
  __shared__ int found_bin, found_rank;
  const int count[4] = {counts.x, counts.y, counts.z, counts.w};
  int higher = sum_of_higher_threads(count[0] + count[1] + count[2] + count[3], totals);
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    if (higher < search.rank && search.rank <= higher + count[i]) {
      found_bin = 4 * threadIdx.x + i;
      found_rank = search.rank - higher;
    }
    higher += count[i];
  }
  __syncthreads();
  return {search.prefix | static_cast<unsigned>(found_bin) << digit.shift, found_rank};
}

// Adds the part's keys that start with the prefix to the block's histogram of their next digit. Returns how many of the
// thread's keys are above all of those.
__device__ inline int count_digit(const Pieces& x, unsigned prefix, Digit digit, int* histogram) {
  const unsigned highest = prefix | ((digit.bins << digit.shift) - 1);
  int above = 0;
  for_pieces(x, [&](int64_t, const unsigned (&key)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned bin = (key[j] ^ prefix) >> digit.shift;  // past all bins if an earlier digit differs
      if (key[j] && bin < digit.bins) atomicAdd(&histogram[bin], 1);
      above += key[j] > highest;
    }
  });
  return above;
}

// Writes the slots of the part's keys above the threshold, and of its first keys equal to it, in ascending order.
// `above` and `equal` are their numbers in the earlier parts; in total at most `ties` equal keys are kept.
__device__ inline void write_kept(const Pieces& x, unsigned threshold, int ties, int above, int equal, int base,
                                  int64_t* out) {
  __shared__ int totals[2][kSelectWarps];  // alternating, so that each step needs only one barrier
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int turn = 0;
  for_pieces(x, [&](unsigned slot, const unsigned (&key)[4]) {
    int mine = 0;  // both counts in one word: above, and equal << 16. A step has at most 2048 of each.
#pragma unroll
    for (int j = 0; j < 4; ++j) mine += key[j] > threshold ? 1 : key[j] == threshold ? 1 << 16 : 0;
    int before = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kWarp, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) totals[turn][warp] = before;
    before -= mine;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < kSelectWarps; ++w) {
      const int total = totals[turn][w];
      if (w < warp) before += total;
      all += total;
    }
    turn ^= 1;

    int ties_before = equal + (before >> 16);
    int64_t* next = out + above + (before & 0xffff) + min(ties_before, ties);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (key[j] > threshold || (key[j] == threshold && ties_before++ < ties))
        *next++ = base + static_cast<int>(slot + j);
    above += all & 0xffff;
    equal += all >> 16;
  });
}

}  // namespace
}  // namespace kvops
