// Selects the slots to keep: exact, ascending, ties to the lower slot.
//
// Scores become unsigned keys of the same order (select.cuh). The k-th largest key of a unit (a row, or a segment of a
// row) is the threshold. The keys above it are kept, and the first of those equal to it. Bytes that must move: each
// score read once, and 8 bytes written per kept slot. There are four regimes. They differ in speed only; the result is
// the same:
//
//   short units (<= 1024 scores; LagKV's segments, by the thousand): one warp each. The keys stay in registers, and the
//     threshold is found bit by bit, with one compare per key and one sum over the warp per bit, until exactly k keys
//     are left. No shared memory, no barrier.
//   long units, at most one per multiprocessor (KeyDiff: 8 rows of 131072): a cluster of up to eight blocks each, if
//     the GPU has clusters. A radix search for the threshold, digit by digit, and the compaction are one launch, in
//     which nothing goes through global memory. The scores are read once: a thread holds 32 keys in registers, so
//     that eight blocks hold 131072; longer units are read again for each of the three digits and the compaction.
//   the same without clusters, or too long for a cluster: the unit is cut into chunks over the whole GPU. Four launches
//     read the scores once each: a histogram per digit, then the compaction. Integer atomics add the histograms of a
//     unit's chunks in global memory. Every block of a launch starts by looking up the bin of the previous digit. That
//     replaces a last-block-done scheme with its counter and fences, and no block waits for another. Chunks also need
//     to know where to write. With the last digit, each chunk therefore stores how many of its keys are at least as
//     large as each of the 1024 keys that are still possible. Whichever becomes the threshold, that entry and its
//     neighbour give the number of keys the chunk keeps.
//   anything in between: one block each, which does the same as a cluster of one.
//
// For each digit, the blocks of a cluster count their keys in histograms, and sum those over groups of 32 bins. After
// one cluster barrier, one warp of each block finds the digit by itself: it adds up the groups of all blocks, and then
// the 64 bins that can contain the wanted key. This reads 4 KiB of histograms; reading all of them would be 64 KiB per
// block and digit. The same sums over only the blocks before this one give the place to write to.
//
// In the compaction, each warp has a run of consecutive scores. One barrier makes the number of keys that the warps
// keep known to all; a warp then puts its kept slots into order in shared memory and stores them side by side.
//
// Scores that crowd into few bins (KeyDiff's are all in (-1, 1)) cost no more than others, as shared-memory atomics on
// one address that add 1 and return nothing merge (ATOMS.POPC.INC). Equal steps between minimum and maximum, as on the
// CPU, would spread the scores, but would take an extra pass and launch.
//
// The position of slots that are kept regardless of score (sinks, window, the tail after the segments), and of those
// that fill a row up (invalid slots, -1), has a closed form. They are spread over all blocks of the row. Budgets and
// valid slots are clamped here and never read on the host.
#pragma once
#include "../ops/select_topk.h"
#include "cluster.cuh"
#include "select.cuh"

namespace kvops {
namespace {

constexpr int64_t kMostInWarp = 1024;    // scores of a unit whose keys fit in the registers of a warp
constexpr int64_t kMostInBlock = 16384;  // longer units are split if there are few of them
constexpr int64_t kLeastInChunk = 4096;
constexpr int64_t kMostInCluster = int64_t{1} << 19;  // beyond this the whole GPU beats eight multiprocessors
constexpr int kShortThreads = 256;

// Units per row: its segments; or one if it has none, for the slots that are kept anyway.
KVOPS_HOST_DEVICE inline int64_t units_per_row(const SelectTopkParams& p) {
  return p.segments > 0 ? p.segments : 1;
}

// A row of the output, [below | head | chosen | tail | beyond | -1]: `kept` slots from [first, end), of which `chosen`
// depend on the scores, surrounded by the invalid slots that fill it up. Everything fits int32, as slots do.
struct OutputRow {
  int first, end;
  int below, head, chosen, kept, beyond;

  __device__ static OutputRow of(const SelectTopkParams& p, unsigned row) {
    const unsigned b = row / static_cast<unsigned>(p.heads);
    const int count = static_cast<int>(p.slots.count(b)), width = static_cast<int>(p.width);
    OutputRow x;
    x.first = static_cast<int>(p.slots.first(b));
    x.end = x.first + count;
    if (p.segments >= 0) {
      const int segments = p.segments ? static_cast<int>(num_segments(count, p.sinks, p.lag)) : 0;
      x.head = static_cast<int>(min(int64_t{count}, p.sinks));
      x.chosen = segments * static_cast<int>(p.k);
      x.kept = count - segments * static_cast<int>(p.lag - p.k);
    } else {
      const int64_t budget = p.budgets ? min(max(int64_t{p.budgets[row]}, p.sinks + p.window), p.k) : p.k;
      const bool all = count <= budget;
      x.head = all ? count : static_cast<int>(p.sinks);
      x.chosen = all ? 0 : static_cast<int>(budget - p.sinks - p.window);
      x.kept = all ? count : static_cast<int>(budget);
    }
    const int missing = p.fill_invalid ? width - x.kept : 0;
    x.below = min(missing, x.first);
    x.beyond = min(missing - x.below, static_cast<int>(p.n) - x.end);
    return x;
  }

  // Entry i of the row, unless it is one of the `chosen`.
  __device__ int entry(int i) const {
    if (i < below) return i;
    i -= below;
    if (i < head) return first + i;
    if (i < kept) return end - (kept - i);
    return i - kept < beyond ? end + (i - kept) : -1;
  }
};

// One selection: the best k of n scores, starting at slot `base`. k = 0 if a row lacks this segment, or keeps
// everything.
struct Unit {
  const float* scores;
  int n, k, base;
  int64_t* out;
};

// Returns unit `index`. If `write` is set, thread `part` of the unit's `parts` also writes its fraction of the row's
// entries that do not depend on scores; these are spread over all threads of all units of the row.
__device__ inline Unit start_unit(const SelectTopkParams& p, unsigned index, int part, int parts, bool write) {
  const unsigned per_row = static_cast<unsigned>(units_per_row(p)), row = index / per_row, s = index % per_row;
  const OutputRow x = OutputRow::of(p, row);
  int64_t* const out = p.indices + row * p.width;
  const int front = x.below + x.head;
  if (write)
    for (int64_t i = int64_t{s} * parts + part; i < p.width - x.chosen; i += int64_t{per_row} * parts) {
      const int at = static_cast<int>(i < front ? i : i + x.chosen);
      out[at] = x.entry(at);
    }
  if (s * p.k >= x.chosen) return {};
  const unsigned heads = static_cast<unsigned>(p.heads);
  const float* scores = p.scores + row / heads * p.stride_b + row % heads * p.stride_h;
  if (p.segments < 0) {
    const int begin = x.first + static_cast<int>(p.sinks);
    return {scores + begin, x.end - static_cast<int>(p.window) - begin, x.chosen, begin, out + front};
  }
  return {scores + s * p.stride_s, static_cast<int>(p.lag), static_cast<int>(p.k),
          static_cast<int>(x.first + p.sinks + s * p.lag), out + front + s * p.k};
}

// Short units: one warp each, score e * 32 + lane in key[e].
template <int kEach>
__global__ void __launch_bounds__(kShortThreads) select_short_kernel(SelectTopkParams p, unsigned units) {
  const unsigned index = blockIdx.x * (kShortThreads / 32) + threadIdx.x / 32;
  if (index >= units) return;
  const int lane = threadIdx.x % 32;
  const Unit unit = start_unit(p, index, lane, 32, true);
  const int n = unit.n, k = unit.k;
  if (k == 0) return;
  unsigned key[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) key[e] = e * 32 + lane < n ? order_key(__ldg(unit.scores + e * 32 + lane)) : 0u;

  // Finds the largest threshold that at least k keys reach, or one that exactly k keys reach, which selects the same.
  unsigned threshold = 0;
  for (unsigned bit = 1u << 31; bit; bit >>= 1) {
    int reach = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) reach += key[e] >= (threshold | bit);
    reach = __reduce_add_sync(kWarp, reach);
    if (reach >= k) threshold |= bit;
    if (reach == k) break;
  }
  int above = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) above += key[e] > threshold;
  int ties = k - __reduce_add_sync(kWarp, above);

  const unsigned lower_lanes = (1u << lane) - 1;
  int64_t* out = unit.out;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const unsigned equal = __ballot_sync(kWarp, key[e] == threshold);
    const bool keep = key[e] > threshold || (key[e] == threshold && __popc(equal & lower_lanes) < ties);
    const unsigned kept = __ballot_sync(kWarp, keep);
    if (keep) out[__popc(kept & lower_lanes)] = unit.base + e * 32 + lane;
    out += __popc(kept);
    ties -= __popc(equal);
  }
}

// The thread's four bins of a histogram.
__device__ inline int4& own_bins(int* histogram) {
  return reinterpret_cast<int4*>(histogram)[threadIdx.x];
}

// What the blocks of a unit tell each other about a digit: how many of their keys are in each bin, and in each group of
// 32 bins.
constexpr int kGroups = kBins / 32, kMostBlocks = 8;
struct Counts {
  int bins[kBins + kUnread];
  int groups[kGroups];
};

// The memory of a block. The places are only written once no block reads the counts any more.
union SelectMemory {
  Counts counts[kDigits];
  uint16_t staged[kKeysInRound];
};

// Of a unit that a cluster selects from, or one block alone.
template <bool kCluster>
struct Blocks {
  unsigned rank, size;  // of this block, and how many there are

  __device__ void sync() const {
    if constexpr (kCluster)
      cluster_sync();
    else
      __syncthreads();
  }
  // The sum of *p over the blocks, and over those before this one.
  __device__ void sum(int2* p, int2& all, int2& before) const {
    all = before = {};
#pragma unroll
    for (unsigned r = 0; r < (kCluster ? kMostBlocks : 1); ++r) {
      int2 x{};
      if constexpr (!kCluster)
        x = *p;
      else if (r < size)
        x = *of_block(p, r);
      all.x += x.x;
      all.y += x.y;
      if (r < rank) {
        before.x += x.x;
        before.y += x.y;
      }
    }
  }
};

// The sum of x over the lanes above this one.
__device__ inline int sum_of_higher_lanes(int x) {
  const int lane = threadIdx.x % 32;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_down_sync(kWarp, sum, step);
    if (lane + step < 32) sum += other;
  }
  return sum - x;
}

// The search over all blocks of a unit, with what this one needs to know to write its slots: how many keys of the
// blocks before are above, and how many of those equal to the threshold they have.
struct SharedSearch : Search {
  int above, equal;
};

// Advances by one digit. One warp looks for the two groups of bins that contain the wanted key, then for the two bins.
template <bool kCluster>
__device__ inline void narrow_shared(SharedSearch& search, Counts& counts, Digit digit,
                                     const Blocks<kCluster>& blocks) {
  const int lane = threadIdx.x % 32;
  int2 *pairs = reinterpret_cast<int2*>(counts.groups), all, before;
  int rank = search.rank, above = 0, pair = 0, found;
#pragma unroll 1  // the same code for groups and bins
  for (int level = 0; level < 2; ++level) {
    blocks.sum(pairs + lane, all, before);
    const int higher = sum_of_higher_lanes(all.x + all.y);
    found = 31 - __clz(__ballot_sync(kWarp, rank <= higher + all.x + all.y));
    rank -= __shfl_sync(kWarp, higher, found);
    above += __reduce_add_sync(kWarp, lane > found ? before.x + before.y : 0);
    pair = 32 * pair + found;
    pairs = reinterpret_cast<int2*>(counts.bins) + 32 * found;
  }
  __syncwarp();  // all lanes have read the search
  if (lane == found) {
    const bool second = rank <= all.y;  // of the two bins
    search.prefix |= static_cast<unsigned>(2 * pair + second) << digit.shift;
    search.rank = rank - (second ? 0 : all.y);
    search.above += above + (second ? 0 : before.y);
    search.equal = second ? before.y : before.x;
  }
}

template <bool kCluster>
__device__ inline void select_unit(const Unit& unit, SelectMemory& memory, const Blocks<kCluster>& blocks) {
  __shared__ SharedSearch search;
  __shared__ Unit chosen;
  __shared__ Pieces scores;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 0; d < kDigits; ++d) own_bins(memory.counts[d].bins) = {};
  if (threadIdx.x == 0) {
    search = {{0, unit.k}, 0, 0};
    chosen = unit;
    scores = Pieces::of(unit.scores, unit.n).part(blocks.rank, blocks.size);
  }
  Held held;
#pragma unroll 1
  for (int d = 0; d < kDigits; ++d) {
    Counts& counts = memory.counts[d];
    __syncthreads();  // the bins are zero, the search has advanced
    count_digit(scores, held, search.prefix, Digit(d), counts.bins);
    __syncthreads();  // all threads have counted
#pragma unroll
    for (int g = warp; g < kGroups; g += kSelectWarps) {
      const int sum = __reduce_add_sync(kWarp, counts.bins[g * 32 + lane]);
      if (lane == 0) counts.groups[g] = sum;
    }
    blocks.sync();  // all blocks have counted
    if (warp == 0) narrow_shared(search, counts, Digit(d), blocks);
  }
  blocks.sync();  // no other block reads this one's shared memory any more
  write_kept(scores, held, search, search.above, search.equal, chosen, memory.staged);
}

// One block per unit.
__global__ void __launch_bounds__(kSelectThreads, 2) select_block_kernel(SelectTopkParams p) {
  __shared__ __align__(16) SelectMemory memory;
  const Unit unit = start_unit(p, blockIdx.x, threadIdx.x, kSelectThreads, true);
  if (unit.k) select_unit(unit, memory, Blocks<false>{0, 1});
}

// One cluster per unit.
__global__ void __launch_bounds__(kSelectThreads, 2) select_cluster_kernel(SelectTopkParams p, unsigned size) {
  DYNAMIC_SHARED(SelectMemory, memory);
  const Blocks<true> blocks{cluster_rank(), size};
  const Unit unit =
      start_unit(p, blockIdx.x / size, blocks.rank * kSelectThreads + threadIdx.x, size * kSelectThreads, true);
  if (unit.k) select_unit(unit, *memory, blocks);  // the same in all blocks of the cluster
}

// Units cut into chunks: the data that the launches pass on in global memory.
struct Chunks {
  unsigned count;   // per unit
  int* histograms;  // [units, kDigits, kBins], zeroed before the first launch
  int* reach;       // [units, count, kReach]: the chunk's keys >= the i-th of the last kLastBins possible thresholds
  Search* found;    // [units, kDigits]: the state before each digit

  Chunks(int64_t units, int chunks, Sections& sections)
      : count(static_cast<unsigned>(chunks)),
        histograms(sections.add<int>(units * kDigits * kBins)),
        reach(sections.add<int>(units * chunks * kReach)),
        found(sections.add<Search>(units * kDigits)) {}

  static constexpr int kReach = kLastBins + 4;  // only one extra entry is used; four keep accesses at 16 bytes

  __device__ int4& bins(unsigned unit, int digit) const {
    return own_bins(histograms + (unit * kDigits + digit) * kBins);
  }
  // The state before `digit`: looks up the previous digit in its histogram.
  __device__ Search before(const Unit& unit, unsigned index, int digit) const {
    if (digit == 0) return {0, unit.k};
    return narrow(found[index * kDigits + digit - 1], bins(index, digit - 1), Digit(digit - 1));
  }
};

template <int kDigit>
__global__ void __launch_bounds__(kSelectThreads) count_digit_kernel(SelectTopkParams p, Chunks chunks) {
  const unsigned index = blockIdx.x / chunks.count, chunk = blockIdx.x % chunks.count;
  const Unit unit = start_unit(p, index, 0, 1, false);
  const Pieces scores = Pieces::of(unit.scores, unit.n).part(chunk, chunks.count);
  if (unit.k == 0 || scores.first >= scores.last) return;
  __shared__ __align__(16) int histogram[kBins + kUnread];
  __shared__ int totals[kSelectWarps];
  own_bins(histogram) = {};
  const Search search = chunks.before(unit, index, kDigit);
  if (chunk == 0 && threadIdx.x == 0) chunks.found[index * kDigits + kDigit] = search;
  __syncthreads();
  const Digit digit(kDigit);
  Held held;
  int above = count_digit(scores, held, search.prefix, digit, histogram);
  if constexpr (kDigit == kDigits - 1) {
    above = __reduce_add_sync(kWarp, above);
    if (threadIdx.x % 32 == 0) atomicAdd(&histogram[kLastBins], above);  // after the digit's own bins
  }
  __syncthreads();
  const int4 counts = own_bins(histogram);
  if (4 * threadIdx.x < digit.bins) {
    int* const bins = &chunks.bins(index, kDigit).x;
    if (counts.x) atomicAdd(bins, counts.x);
    if (counts.y) atomicAdd(bins + 1, counts.y);
    if (counts.z) atomicAdd(bins + 2, counts.z);
    if (counts.w) atomicAdd(bins + 3, counts.w);
  }
  if constexpr (kDigit == kDigits - 1) {
    int4 reach;
    reach.w = sum_of_higher_threads(counts.x + counts.y + counts.z + counts.w, totals) + counts.w;
    reach.z = reach.w + counts.z;
    reach.y = reach.z + counts.y;
    reach.x = reach.y + counts.x;
    if (4 * threadIdx.x < Chunks::kReach)
      own_bins(chunks.reach + (index * chunks.count + chunk) * Chunks::kReach) = reach;
  }
}

__global__ void __launch_bounds__(kSelectThreads) write_chunks_kernel(SelectTopkParams p, Chunks chunks) {
  const unsigned index = blockIdx.x / chunks.count, chunk = blockIdx.x % chunks.count;
  const Unit unit = start_unit(p, index, chunk * kSelectThreads + threadIdx.x, chunks.count * kSelectThreads, true);
  const Pieces scores = Pieces::of(unit.scores, unit.n).part(chunk, chunks.count);
  if (unit.k == 0 || scores.first >= scores.last) return;
  __shared__ uint16_t staged[kKeysInRound];
  __shared__ int above, equal;  // in the chunks before
  if (threadIdx.x == 0) above = equal = 0;
  const Search search = chunks.before(unit, index, kDigits);
  const int* reach = chunks.reach + index * chunks.count * Chunks::kReach + search.prefix % kLastBins;
  for (unsigned c = threadIdx.x; c < chunk; c += kSelectThreads) {
    const int at_least = reach[c * Chunks::kReach], more = reach[c * Chunks::kReach + 1];
    atomicAdd(&above, more);
    atomicAdd(&equal, at_least - more);
  }
  __syncthreads();
  Held held;
  write_kept(scores, held, search, above, equal, unit, staged);
}

// How a call is divided. It needs `workspace` bytes.
struct SelectPlan {
  int64_t units, length;
  unsigned cluster;  // blocks per unit, or 0
  int chunks;        // per unit, or 0
  int64_t workspace;

  static SelectPlan of(const SelectTopkParams& p) {
    SelectPlan x{p.b * p.heads * units_per_row(p), p.segments < 0 ? p.n : p.segments > 0 ? p.lag : 0, 0, 0, 0};
    const int64_t processors = multiprocessors();
    if (x.length <= kMostInBlock || x.units == 0 || x.units > processors) return x;
    if (x.length <= kMostInCluster && has_clusters<select_cluster_kernel>()) {
      x.cluster = 8;
      while (x.cluster > 2 && x.units * x.cluster > 2 * processors) x.cluster /= 2;
      return x;
    }
    // In every launch two blocks run on each multiprocessor at a time, as far as registers allow.
    const int64_t chunks = (x.length + kLeastInChunk - 1) / kLeastInChunk, most = 2 * processors / x.units;
    x.chunks = static_cast<int>(chunks < most ? chunks : most);
    x.workspace = bytes_of<Chunks>(x.units, x.chunks);
    return x;
  }
};

inline void select_topk_cuda(const SelectTopkParams& p, const SelectPlan& plan, void* workspace, cudaStream_t stream) {
  if (plan.units * p.width == 0) return;
  if (plan.length <= kMostInWarp) {
    constexpr int kWarps = kShortThreads / 32;
    const unsigned units = grid_of(plan.units).x, blocks = (units + kWarps - 1) / kWarps;
    if (plan.length <= 128) return launch<select_short_kernel<4>>(blocks, kShortThreads, 0, stream, p, units);
    if (plan.length <= 512) return launch<select_short_kernel<16>>(blocks, kShortThreads, 0, stream, p, units);
    return launch<select_short_kernel<32>>(blocks, kShortThreads, 0, stream, p, units);
  }
  if (plan.cluster) {
    return launch_clusters<select_cluster_kernel>(plan.cluster, grid_of(plan.units * plan.cluster), kSelectThreads,
                                                  sizeof(SelectMemory), stream, p, plan.cluster);
  }
  if (!plan.chunks) return launch<select_block_kernel>(grid_of(plan.units), kSelectThreads, 0, stream, p);

  Sections sections{workspace};
  const Chunks chunks(plan.units, plan.chunks, sections);
  zero_async(chunks.histograms, 4 * plan.units * kDigits * kBins, stream);
  const dim3 grid = grid_of(plan.units * plan.chunks);
  launch<count_digit_kernel<0>>(grid, kSelectThreads, 0, stream, p, chunks);
  launch<count_digit_kernel<1>>(grid, kSelectThreads, 0, stream, p, chunks);
  launch<count_digit_kernel<2>>(grid, kSelectThreads, 0, stream, p, chunks);
  launch<write_chunks_kernel>(grid, kSelectThreads, 0, stream, p, chunks);
}

}  // namespace
}  // namespace kvops
