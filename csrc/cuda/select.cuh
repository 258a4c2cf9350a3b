// Exact selection of the largest scores: ordered keys, the threshold digit by digit, and the compaction.
//
// Blocks have kSelectThreads threads. Counts are int32: a row has fewer than 2^31 slots (check_valid_slots).
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

constexpr int kSelectThreads = 512, kSelectWarps = kSelectThreads / 32;
constexpr int kHeld = 8;  // pieces of four keys that a thread holds in registers
constexpr int kRound = kHeld * kSelectThreads, kKeysInRound = 4 * kRound;

// A score as an unsigned number of the same order: NaN is 1, then -inf, then by value, with -0.0 equal to 0.0. 0 means
// no score and loses against everything, so positions past a row's end need no special treatment.
__device__ inline unsigned order_key(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0.0 becomes 0.0
  return x == x ? bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 1u << 31) : 1u;
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
  __device__ unsigned key(unsigned slot) const {
    return slot < static_cast<unsigned>(n) ? order_key(__ldg(scores + slot)) : 0u;
  }
  // The pieces from `whole_from` to before `whole_to` are complete.
  __device__ int whole_from() const { return shift > 0; }
  __device__ int whole_to() const { return min(last, static_cast<int>((static_cast<unsigned>(n) + shift) / 4)); }
  __device__ const float4* whole(int piece) const { return reinterpret_cast<const float4*>(scores - shift) + piece; }
};

// The keys of a round of a part, in registers: up to kRound pieces. Each warp holds a run of consecutive pieces, and
// each lane every 32nd of them, so that loads are coalesced, and only the warps' totals are needed to put the kept
// slots into order. A part of one round is read once for all passes; a longer one, in each pass.
struct Held {
  unsigned key[kHeld][4];
  int base = -1;  // the first piece of the round

  // Pieces per thread. The keys of those past the end of the part are 0.
  __device__ int steps(const Pieces& x) const {
    return (min(kRound, x.last - base) + kSelectThreads - 1) / kSelectThreads;
  }
  // The first piece of the warp's run.
  __device__ int run(const Pieces& x) const { return base + static_cast<int>(threadIdx.x / 32) * steps(x) * 32; }

  __device__ void load(const Pieces& x, int round) {
    const bool held = base == round;
    base = round;
    if (held) return;
    const int first = run(x) + threadIdx.x % 32, end = min(x.last, run(x) + steps(x) * 32);
    const int from = x.whole_from() - first, to = min(x.whole_to(), end) - first;  // the whole ones, after the first
    const float4* const scores = x.whole(first);
    float4 loaded[kHeld];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) loaded[u] = u * 32 >= from && u * 32 < to ? __ldg(scores + u * 32) : float4{};
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      key[u][0] = order_key(loaded[u].x);
      key[u][1] = order_key(loaded[u].y);
      key[u][2] = order_key(loaded[u].z);
      key[u][3] = order_key(loaded[u].w);
    }
    if (from <= 0 && to > (kHeld - 1) * 32) return;
    // Incomplete pieces: at most the first one, and the one after the whole ones.
    const int rest = x.whole_to() - first;
    unsigned last[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) last[j] = x.key(x.slot(first + rest) + j);
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (u * 32 >= to) key[u][j] = u * 32 == rest && first + rest < end ? last[j] : 0u;
    if (from > 0)
#pragma unroll
      for (int j = 0; j < 4; ++j) key[0][j] = x.key(x.slot(first) + j);
  }
};

// Keys have three digits, of 11, 11 and 10 bits. A histogram has kBins counts, four per thread of the block. Keys that
// an earlier digit rules out are counted in one of the kUnread bins after those, one per lane: without that, the
// compiler would branch around the atomic of each key.
constexpr int kDigits = 3, kBins = 2048, kLastBins = 1024, kUnread = 32;
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
// thread's keys are above all of those. Positions past the end count as key 0, which is below all others.
__device__ inline int count_digit(const Pieces& x, Held& held, unsigned prefix, Digit digit, int* histogram) {
  const unsigned highest = prefix | ((digit.bins << digit.shift) - 1), unread = kBins + threadIdx.x % 32;
  int above = 0;
  for (int base = x.first; base < x.last; base += kRound) {
    held.load(x, base);
    const int steps = held.steps(x);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      if (u >= steps) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned key = held.key[u][j];
        const unsigned bin = (key ^ prefix) >> digit.shift;  // past all bins if an earlier digit differs
        atomicAdd(&histogram[bin < digit.bins ? bin : unread], 1);
        above += key > highest;
      }
    }
  }
  return above;
}

// Calls fn(bit, place) for each bit that is set in `marks`, in which bit 4 * u + j is the lane's key[u][j]: place is
// its number in ascending order of slots over the warp.
template <class Fn>
__device__ inline void for_marked(unsigned marks, const Fn& fn) {
  const int lane = threadIdx.x % 32;
  // The number of marks of each piece, in a byte each: the warp has at most 128 in one step.
  unsigned counts = marks - (marks >> 1 & 0x55555555u);
  counts = (counts & 0x33333333u) + (counts >> 2 & 0x33333333u);
  const unsigned own[2] = {counts & 0x0f0f0f0fu, counts >> 4 & 0x0f0f0f0fu};  // of the even and the odd pieces
  unsigned lower[2] = {own[0], own[1]}, all[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned other = __shfl_up_sync(kWarp, lower[i], step);
      if (lane >= step) lower[i] += other;
    }
    all[i] = __shfl_sync(kWarp, lower[i], 31);
    lower[i] -= own[i];
  }
  int done = 0;
#pragma unroll 1  // the code is short, and nothing is computed in advance
  for (int pair = 0; pair < kHeld / 2; ++pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = 8 * pair + 4 * i;
      int place = done + (lower[i] >> 8 * pair & 0xff);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (marks >> (first + j) & 1) fn(first + j, place++);
      done += all[i] >> 8 * pair & 0xff;
    }
  }
}
static_assert(kHeld == 8, "the marks of a lane fill one word");

// Writes the slots of the part's keys above the threshold, and of its first keys equal to it, in ascending order.
// `above` and `equal` are their numbers in the earlier parts; in total at most `ties` equal keys are kept. Each warp
// puts the places of its kept keys into its part of `staged`, kKeysInRound entries, so that stores are coalesced. Slots
// start at unit.base, and go to unit.out.
template <class Unit>
__device__ inline void write_kept(const Pieces& x, Held& held, const Search& search, int above, int equal,
                                  const Unit& unit, uint16_t* staged) {
  __shared__ int totals[2][kSelectWarps];  // alternating, so that each round needs only one barrier
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  staged += warp * (kKeysInRound / kSelectWarps);
  int turn = 0;
  for (int round = x.first; round < x.last; round += kRound) {
    held.load(x, round);
    const unsigned threshold = search.prefix;
    unsigned kept = 0, ties_here = 0;
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned key = held.key[u][j], mark = 1u << (4 * u + j);
        kept |= key > threshold ? mark : 0u;
        ties_here |= key == threshold ? mark : 0u;
      }
    }
    // Both counts in one word: above, and equal << 16. A round has at most 16384 of each.
    const int own = __reduce_add_sync(kWarp, __popc(kept) + (__popc(ties_here) << 16));
    if (lane == 0) totals[turn][warp] = own;
    __syncthreads();
    const int total = lane < kSelectWarps ? totals[turn][lane] : 0;
    const int before = __reduce_add_sync(kWarp, lane < warp ? total : 0), all = __reduce_add_sync(kWarp, total);
    turn ^= 1;

    const int ties = search.rank, equal_before = min(equal + (before >> 16), ties);
    const int keep = min(own >> 16, ties - equal_before);
    if (keep == own >> 16)
      kept |= ties_here;
    else if (keep)
      for_marked(ties_here, [&](int bit, int place) { kept |= place < keep ? 1u << bit : 0u; });
    for_marked(kept,
               [&](int bit, int place) { staged[place] = static_cast<uint16_t>(bit / 4 * 128 + lane * 4 + bit % 4); });
    __syncwarp();  // the places are written
    int64_t* const first = unit.out + above + (before & 0xffff) + equal_before;
    const int slot = unit.base + static_cast<int>(x.slot(held.run(x))), count = (own & 0xffff) + keep;
    for (int i = lane; i < count; i += 32) first[i] = slot + staged[i];
    __syncwarp();  // and may be overwritten
    above += all & 0xffff;
    equal += all >> 16;
  }
}

}  // namespace
}  // namespace kvops
