// outlier_degree: how little a key looks like its neighbours.
//
//   S(i)     = mean over the valid j with |i - j| <= kappa of cos(k_i, k_j)
//   Theta(i) = (E[S] - S(i)) / sqrt(Var[S])
//
// Bytes that must move: K once; the scores are small. With 8 heads of 131072 keys, d = 128, bf16 they are 268 MB: 56 us
// of an H200. In that time each of its 528 schedulers can issue 50 instructions for each of its tokens, at 1.8 GHz.
//
// Band, for kappa up to 8, so for the default of 5: the similarities are a band of K K^T, which tensor cores multiply.
// A warp goes over a run of keys, 8 at a time. These are the columns of a product whose rows are the 8 before and they
// themselves: every pair of a band of 8 is in it, and no pair twice. So a key is read once, straight to registers, in
// whole pieces; its neighbours' words are still there. One mma.sync for each 16 channels of 8 keys: 1 for a token of
// d = 128. Norms are the diagonal of the product, so keys go in as they are, and the products are scaled: each counts
// for both of its keys. fp32 goes as three parts of bf16, 6 mma.sync instead of 1: all products of parts but those
// below 2^-21 of theirs, which shorten a cosine's numerator as much as its denominator. No shared memory, no barrier;
// the next keys are on their way while these meet. A run of 64 keys meets 80, of which 2 kappa come from L2.
//
// Walk, for larger kappa and for rows of more than 512 bytes: the time per token does not grow with kappa. kLanes lanes
// share a row, and each such group walks a run of tokens with the sum of the window's unit keys in registers: plus the
// key that comes, minus the one that goes, dot the one in the middle. A run is as long as kappa (16 at least), so that
// the keys before its first token are at most twice its own. Before that the block writes what makes its keys unit
// vectors to shared memory, for kappa keys on either side too. It reads a key four times, three of them out of L1 or
// L2.
//
// Counted in the code for sm_90a, d = 128: Band takes 180 instructions of a warp for 8 bf16 keys, so with the 80 that a
// run of 64 meets 28 for a token; in fp32, which has twice the time, 77. Walk took 149 in bf16 at kappa 5. Predicted
// for Band in bf16 are 80 % of the bytes' floor: DRAM at 90 % of its rate, 4 us of the first and last runs, 4 us of
// standardize. A kappa of 9 to 16 would need twice the products and the registers of 8 more keys.
//
// The keys whose squared norm is not a comfortable float are rare. Band finds them on the diagonal and does their 8
// keys again, with their rows times powers of two. Walk gets their norms in double, and makes them unit vectors in two
// steps.
//
// standardize, where it is wanted: a block leaves the sum of its similarities and of their squares, in double: they lie
// in [-1, 1], so a variance of 1e-12, below which they count as all alike, is still far above double's rounding. A
// second kernel adds these up, each of its blocks for itself and all in the same order, and turns the similarities to
// outlier degrees.
//
// Blocks of a padded row are counted from its first valid slot, and the slots before that come last, as if the cache
// were a ring. No result depends on the grid, but on kappa and the head dim. Not yet measured on a GPU.
#pragma once
#include "../ops/outlier_degree.h"
#include "math.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace kvops {
namespace {

constexpr int kDegreeThreads = 128, kDegreeWarps = kDegreeThreads / 32;

// ---- Similarities to degrees
// -----------------------------------------------------------------------------------------

// What similarities add up to.
struct SimilaritySums {
  double count, sum, squares;

  __device__ void add(double others, double their_sum, double their_squares) {
    count += others;
    sum += their_sum;
    squares += their_squares;
  }
};

// The sums of all threads, in an order that depends on nothing. All get them, and have passed a barrier.
__device__ inline SimilaritySums block_sums(SimilaritySums x) {
  __shared__ SimilaritySums of_warps[kDegreeWarps];
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    x.add(__shfl_xor_sync(kWarp, x.count, step), __shfl_xor_sync(kWarp, x.sum, step),
          __shfl_xor_sync(kWarp, x.squares, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();  // the warps' sums are there
  x = of_warps[0];
  for (int i = 1; i < kDegreeWarps; ++i) x.add(of_warps[i].count, of_warps[i].sum, of_warps[i].squares);
  return x;
}

// What becomes of similarities: (mean - x) * scale.
struct Standard {
  double mean, scale;

  __device__ static Standard of(const SimilaritySums& x) {
    const double mean = x.sum / x.count, variance = x.squares / x.count - mean * mean;
    const double flat = static_cast<double>(kFlatSimilarity) * kFlatSimilarity;
    return {mean, variance > flat ? 1 / sqrt(variance) : 0.0};
  }
};

// How a call is cut.
struct DegreePlan {
  int run, tokens;  // tokens of a warp or a lane group, and of a block
  unsigned blocks;  // of a head
  int64_t shared;   // bytes

  static DegreePlan of(const OutlierDegreeParams& p, int run, int runs, int64_t shared) {
    const int tokens = run * runs;
    return {run, tokens, static_cast<unsigned>((p.n + tokens - 1) / tokens), shared};
  }
};

// A head's keys, by tokens from the first valid slot.
struct HeadKeys {
  HeadRows rows;
  int pieces, count, kappa;
  bool wide;
};

// ---- Small kappa: products of tensor cores
// ---------------------------------------------------------------------------

constexpr int kBandKeys = 8;  // that meet at a time, so the most kappa

template <int kTurn>
using TurnOf = std::integral_constant<int, kTurn>;

// What a warp multiplies: 8 keys and the 8 before them, which are the rows 0-7 and 8-15 of a tensor core's A by turns;
// the columns of its B are those 8 keys. A lane loads whole pieces, of key l / 4 the pieces l % 4 + 4 i, and hands
// their words on as they are, as the order of a product's terms is free. fp32 goes in three parts of bf16, which make
// up its 24 bits.
template <class T, int kPieces>
struct BandKeys {
  using Product = std::conditional_t<sizeof(T) == 4, BFloat16, Value<T>>;
  static constexpr int kParts = sizeof(T) == 4 ? 3 : 1, kSteps = sizeof(T) == 4 ? 1 : 2;  // kSteps: products of a piece
  static constexpr unsigned kHigh = 0xffff0000u;  // of a float: the bf16 next to it towards zero
  unsigned rows[kParts][kPieces * kSteps][4];

  // The keys that come take the place of the older ones.
  template <int kTurn>
  __device__ void take(const uint4 (&raw)[kPieces]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if constexpr (sizeof(T) < 4) {
        rows[0][2 * i][kTurn] = raw[i].x;
        rows[0][2 * i][kTurn + 2] = raw[i].y;
        rows[0][2 * i + 1][kTurn] = raw[i].z;
        rows[0][2 * i + 1][kTurn + 2] = raw[i].w;
      } else {
        unsigned x[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          rows[part][i][kTurn] = x[0] >> 16 | (x[1] & kHigh);
          rows[part][i][kTurn + 2] = x[2] >> 16 | (x[3] & kHigh);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = __float_as_uint(__uint_as_float(x[e]) - __uint_as_float(x[e] & kHigh));
        }
      }
    }
  }

  // before[e]: the product of key l / 4 of those before with key 2 (l % 4) + e; own[e]: of key l / 4 with the same.
  template <int kTurn>
  __device__ void multiply(int pieces, float (&before)[2], float (&own)[2]) const {
    constexpr int kSums = kParts == 1 ? 2 : kParts;  // by the size of the terms; of even and of odd steps
    float sums[kSums][4] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (4 * i >= pieces) break;
#pragma unroll
      for (int s = i * kSteps; s < (i + 1) * kSteps; ++s)
#pragma unroll
        for (int a = 0; a < kParts; ++a)
#pragma unroll
          for (int b = 0; a + b < kParts; ++b)
            mma<Product>(sums[kParts == 1 ? s % 2 : a + b], rows[a][s][0], rows[a][s][1], rows[a][s][2], rows[a][s][3],
                         rows[b][s][kTurn], rows[b][s][kTurn + 2]);
    }
#pragma unroll
    for (int part = kSums - 1; part > 0; --part)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[part - 1][e] += sums[part][e];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      before[e] = sums[0][2 - 2 * kTurn + e];
      own[e] = sums[0][2 * kTurn + e];
    }
  }
};

// Makes a rare row one like others, its lanes together: zeros if it is not finite, and if its squared norm might not be
// comfortable, times a power of two, which changes no cosine. Was it finite?
template <class T, int kPieces>
__device__ inline bool mend_row(uint4 (&raw)[kPieces]) {
  constexpr int kValues = kPiece<T>;
  float x[kValues], most = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    unpack<T>(raw[i], x);
#pragma unroll
    for (int e = 0; e < kValues; ++e) most = fmaxf(most, is_finite(x[e]) ? fabsf(x[e]) : CUDART_INF_F);
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(kWarp, most, step));
  const bool finite = is_finite(most);
  if (finite && 0x1p-39f <= most && most < 0x1p39f) return true;
  const unsigned exponent = max(__float_as_uint(most) >> 23, 1u);  // the scaled row's largest is in [2, 4)
  const float scale = __uint_as_float((255 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    unpack<T>(raw[i], x);
#pragma unroll
    for (int e = 0; e < kValues; ++e) x[e] = finite ? x[e] * scale : 0.0f;
    raw[i] = pack<T>(x);
  }
  return finite;
}

// Each warp for itself, without shared memory or barriers: 8 keys after 8 keys meet themselves and the 8 before.
template <class T, int kPieces>
struct Band {
  using Stored = T;
  static constexpr int kBlocks = kPieces == 4 ? (sizeof(T) < 4 ? 4 : 3) : (sizeof(T) < 4 ? 3 : 2);
  static constexpr int kRun = 64;  // keys of a warp, a multiple of 32

  static DegreePlan plan(const OutlierDegreeParams& p) { return DegreePlan::of(p, kRun, kDegreeWarps, 0); }

  // fn(token, its similarity) for the block's tokens from `block` on, by one thread for each.
  template <class Fn>
  __device__ static void similarities(const HeadKeys& keys, const DegreePlan&, int block, const Fn& fn) {
    // Of lane 0, so that the compiler sees that the warp's lanes agree.
    const int first = block + __shfl_sync(kWarp, static_cast<int>(threadIdx.x) / 32, 0) * kRun;
    if (first >= keys.count) return;
    // From here on keys count from `first`. Those in [begin, end) are there.
    const int kappa = keys.kappa, begin = max(-kappa, -first), end = min(kRun + kappa, keys.count - first);
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    const bool diagonal = lane % 4 == lane / 8;  // of a row's four lanes, the one that has the product with itself
    const auto near = [&](int distance) { return -kappa <= distance && distance <= kappa ? 1.0f : 0.0f; };
    const float near_before[2] = {near(kBandKeys + column - row), near(kBandKeys + column + 1 - row)};
    const float near_own[2] = {near(column - row), near(column + 1 - row)};

    HeadRows pieces = keys.rows.from(first);
    pieces.data += lane % 4 * kPieceBytes<T>;
    const int count = keys.pieces - lane % 4;  // of a key, the lane has every fourth
    uint4 raw[kPieces] = {};
    const auto at_key = [&](int at) {  // that of 8 from `at` on; for one that is not there, the nearest
      return pieces.row(min(max(at + row, begin), end - 1));
    };
    const auto load = [&](const char* from) {
      if (keys.wide) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (4 * i < count) raw[i] = load_piece<T, true>(from + 4 * kPieceBytes<T> * i);
      } else {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (4 * i < count) raw[i] = load_piece<T, false>(from + 4 * kPieceBytes<T> * i);
      }
    };

    BandKeys<T, kPieces> both = {};
    const char* key = at_key(-kBandKeys);
    float sum_before = 0, factor_before = 0;  // of key `row` of those before: what its similarities add up to
    unsigned usable = 0;                      // bits: of the 8 keys before those before, of those, and of these
    float total = 0;                          // of the token that the lane writes, and its neighbours from bit 0 on
    unsigned neighbours = 0;
    const auto meet = [&](auto turn, int at) {
      constexpr int kTurn = decltype(turn)::value;
      unsigned there = 0xffu << max(begin - at, 0) & 0xffu >> min(max(at + kBandKeys - end, 0), 8);
      const char* const next = at_key(at + kBandKeys);
      float back[2], here[2], squares;
      for (bool rare = false;; rare = true) {
        if (rare) {
          load(key);
          there &= ~__reduce_or_sync(kWarp, mend_row<T>(raw) ? 0u : 1u << row);
        }
        both.template take<kTurn>(raw);
        load(next);
        both.template multiply<kTurn>(keys.pieces, back, here);
        squares = row % 2 ? here[1] : here[0];
        if (rare || !__any_sync(kWarp, diagonal && !comfortable(squares))) break;
      }
      const float factor = there >> row & 1 && squares > 0 ? rsqrt_fast(squares) : 0.0f;  // of key `row`, if diagonal
      const float of_row = __shfl_sync(kWarp, factor, 4 * row + lane / 8);
      float sum = 0, of_keys[2];  // of key `row`; of keys `column` and the next with those before
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_column = __shfl_sync(kWarp, factor, 9 * (lane % 4) + 4 * e);
        back[e] *= near_before[e];
        sum_before = fmaf(back[e], of_column, sum_before);
        sum = fmaf(here[e] * near_own[e], of_column, sum);
        of_keys[e] = back[e] * factor_before;
      }
      // Over the rows: odd ones add up those of the second column, so that a key's sum comes to its diagonal.
      float of_key = (row % 2 ? of_keys[1] : of_keys[0]) + __shfl_xor_sync(kWarp, row % 2 ? of_keys[0] : of_keys[1], 4);
      of_key += __shfl_xor_sync(kWarp, of_key, 8);
      of_key += __shfl_xor_sync(kWarp, of_key, 16);
      if (diagonal) sum += of_key;
      // The keys before are done. Four times 8 of them are one for each lane.
      usable = usable >> kBandKeys | there << 2 * kBandKeys;
      sum_before = lanes_sum<4>(sum_before);
      if (((at - kBandKeys) & 24) == lane % 4 * kBandKeys) {
        total = sum_before * factor_before;
        neighbours = usable >> (kBandKeys + row - kappa) & ((2u << 2 * kappa) - 1);
      }
      if (at > 0 && at % 32 == 0)
        fn(first + at - 32 + lane % 4 * kBandKeys + row,
           neighbours >> kappa & 1 ? total / static_cast<float>(__popc(neighbours)) : CUDART_NAN_F);
      sum_before = sum;
      factor_before = of_row;
      key = next;
    };
    load(key);
#pragma unroll 1
    for (int at = -kBandKeys; at <= kRun; at += 2 * kBandKeys) {
      meet(TurnOf<0>{}, at);
      meet(TurnOf<1>{}, at + kBandKeys);
    }
  }
};

// ---- Any kappa: sums of unit keys
// ------------------------------------------------------------------------------------

// What makes a key a unit vector: a factor. 0 for a zero key, NaN for one that is not finite. Negative: 2^44 or 2^-44
// comes first, then this without its sign, for keys where both at once would be no float.
template <class Lanes, int N>
__device__ inline float unit_factor(const float (&x)[N]) {
  const float squares = dot<float, Lanes>(x, x);
  float factor = rsqrtf(squares);
  if (__any_sync(kWarp, !comfortable(squares))) {
    const double exact = dot<double, Lanes>(x, x), step = exact < 1 ? 0x1p44 : 0x1p-44;
    if (!comfortable(squares))
      factor = exact == 0 ? 0.0f : exact < CUDART_INF ? static_cast<float>(-1 / (sqrt(exact) * step)) : CUDART_NAN_F;
  }
  return factor;
}

// The keys around a block, as its lane groups read them, by tokens of the row.
template <class T, class Lanes, bool kWide>
struct Neighbours {
  static constexpr int kValues = RowPieces<T, Lanes>::kValues;
  HeadRows rows;
  int pieces;
  int begin, end;  // those that there are
  float* factors;  // of these, in shared memory

  __device__ bool has(int token) const { return begin <= token && token < end; }

  __device__ void load(int token, float (&x)[kValues]) const {
    RowPieces<T, Lanes> row;
    row.template load<kWide>(rows.row(has(token) ? token : 0), has(token) ? pieces : 0);
    row.values(x);
  }

  // By the whole block; a barrier follows.
  __device__ void make_factors() const {
    constexpr int kGroups = kDegreeThreads / Lanes::kLanes, kUnroll = 4 / Lanes::kPieces > 1 ? 4 / Lanes::kPieces : 1;
    for (int base = begin; base < end; base += kGroups * kUnroll) {
      const int token = base + threadIdx.x / Lanes::kLanes;
      float x[kUnroll][kValues];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) load(token + u * kGroups, x[u]);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const float factor = unit_factor<Lanes>(x[u]);
        if (threadIdx.x % Lanes::kLanes == 0 && has(token + u * kGroups)) factors[token + u * kGroups - begin] = factor;
      }
    }
  }

  // A key and its factor, both 0 if it is nobody's neighbour. Is it one?
  __device__ bool get(int token, float (&x)[kValues], float& factor) const {
    load(token, x);
    factor = has(token) ? factors[token - begin] : CUDART_NAN_F;
    if (factor >= 0) return true;
    const bool finite = factor < 0;
    const float first = factor > -1 ? 0x1p-44f : 0x1p44f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = finite ? x[i] * first : 0.0f;
    factor = finite ? -factor : 0.0f;
    return finite;
  }
};

template <class T, class Lanes>
struct Walk {
  using Stored = T;
  static constexpr int kBlocks = 1;

  static DegreePlan plan(const OutlierDegreeParams& p) {
    const int kappa = static_cast<int>(p.kappa), run = kappa > 16 ? kappa : 16, runs = kDegreeThreads / Lanes::kLanes;
    return DegreePlan::of(p, run, runs, int64_t{4} * (run * runs + 2 * kappa));
  }

  // fn(token, its similarity) for the block's tokens from `first` on, by one thread for each.
  template <class Fn>
  __device__ static void similarities(const HeadKeys& keys, const DegreePlan& plan, int first, const Fn& fn) {
    DYNAMIC_SHARED(float, factors);  // [tokens + 2 kappa]
    const auto all = [&](auto rows_are_wide) {
      const Neighbours<T, Lanes, decltype(rows_are_wide)::value> around{
          keys.rows, keys.pieces, max(first - keys.kappa, 0), min(first + plan.tokens + keys.kappa, keys.count),
          factors};
      around.make_factors();
      __syncthreads();  // all factors are there
      walk(around, first + static_cast<int>(threadIdx.x) / Lanes::kLanes * plan.run, plan.run, keys.kappa, fn);
    };
    keys.wide ? all(std::true_type{}) : all(std::false_type{});
  }

  template <class Keys, class Fn>
  __device__ static void walk(const Keys& keys, int first, int run, int kappa, const Fn& fn) {
    constexpr int kValues = Keys::kValues;
    float sum[kValues] = {}, x[kValues], factor;  // sum: of the window's unit keys
    int neighbours = 0;                           // in it
    const auto add = [&](float weight) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sum[i] = fmaf(x[i], weight, sum[i]);
    };
    for (int comes = first - kappa; comes < first + run + kappa; ++comes) {
      neighbours += keys.get(comes, x, factor);
      add(factor);
      const int token = comes - kappa;
      if (token < first) continue;
      if (token > first) {
        neighbours -= keys.get(token - kappa - 1, x, factor);
        add(-factor);
      }
      const bool usable = keys.get(token, x, factor);
      const float total = dot<float, Lanes>(x, sum) * factor;
      if (threadIdx.x % Lanes::kLanes == 0) fn(token, usable ? total / static_cast<float>(neighbours) : CUDART_NAN_F);
    }
  }
};

// ---- Kernels
// ---------------------------------------------------------------------------------------------------------

template <class Way, bool kPaged>
__global__ void __launch_bounds__(kDegreeThreads, Way::kBlocks)
    similarity_kernel(OutlierDegreeParams p, DegreePlan plan, SimilaritySums* partial_sums, bool wide) {
  const unsigned row = blockIdx.x / plan.blocks, heads = static_cast<unsigned>(p.heads), b = row / heads;
  const int start = static_cast<int>(p.slots.first(b)), count = static_cast<int>(p.slots.count(b));
  const int n = static_cast<int>(p.n), first = static_cast<int>(blockIdx.x % plan.blocks) * plan.tokens;
  float* const scores = p.scores + row * p.n;
  const auto slot_of = [&](int token) { return token < n - start ? start + token : start + token - n; };
  for (int token = max(first, count) + threadIdx.x; token < min(first + plan.tokens, n); token += kDegreeThreads)
    scores[slot_of(token)] = CUDART_NAN_F;
  if (first >= count) return;

  const HeadKeys keys{head_rows<kPaged, typename Way::Stored>(p.k, b, row % heads).from(start),
                      static_cast<int>(p.k.row_bytes / 16), count, static_cast<int>(p.kappa), wide};
  Way::similarities(keys, plan, first, [&](int token, float x) {
    if (token < count) scores[slot_of(token)] = x;
  });
  if (!p.standardize) return;
  __syncthreads();  // the block's similarities are there
  SimilaritySums sums{};
  for (int token = first + threadIdx.x; token < min(first + plan.tokens, count); token += kDegreeThreads) {
    const float x = scores[slot_of(token)];
    if (x == x) sums.add(1, x, static_cast<double>(x) * x);
  }
  sums = block_sums(sums);
  if (threadIdx.x == 0) partial_sums[blockIdx.x] = sums;
}

constexpr int kStandardTokens = 16;  // of a thread

// Every block adds up the sums of its head, in their order.
__global__ void __launch_bounds__(kDegreeThreads)
    standardize_kernel(OutlierDegreeParams p, DegreePlan plan, const SimilaritySums* partial_sums, unsigned blocks) {
  const unsigned row = blockIdx.x / blocks;
  const int64_t first = int64_t{blockIdx.x % blocks} * kDegreeThreads * kStandardTokens + threadIdx.x;
  float* const scores = p.scores + row * p.n;
  float x[kStandardTokens];
#pragma unroll
  for (int i = 0; i < kStandardTokens; ++i)
    x[i] = first + i * kDegreeThreads < p.n ? scores[first + i * kDegreeThreads] : 0.0f;
  const int64_t needed = (p.slots.count(row / p.heads) + plan.tokens - 1) / plan.tokens;
  SimilaritySums sums{};
  for (int64_t i = threadIdx.x; i < needed; i += kDegreeThreads) {
    const SimilaritySums& of_block = partial_sums[int64_t{row} * plan.blocks + i];
    sums.add(of_block.count, of_block.sum, of_block.squares);
  }
  const Standard of = Standard::of(block_sums(sums));
#pragma unroll
  for (int i = 0; i < kStandardTokens; ++i)
    if (first + i * kDegreeThreads < p.n)
      scores[first + i * kDegreeThreads] = static_cast<float>((of.mean - x[i]) * of.scale);
}

// fn(Band or Walk) for the call.
template <class Fn>
inline void with_way(const OutlierDegreeParams& p, const Fn& fn) {
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.kappa <= kBandKeys) {
      if (p.k.row_bytes <= 256) return fn(Band<T, 4>{});
      if (p.k.row_bytes <= 512) return fn(Band<T, 8>{});
    }
    with_lanes<T>(p.d / kPiece<T>, [&](auto lanes) { fn(Walk<T, decltype(lanes)>{}); });
  });
}

struct OutlierDegreeMemory {
  SimilaritySums* sums;  // [b, Hk, blocks]

  OutlierDegreeMemory(const OutlierDegreeParams& p, Sections& sections) {
    with_way(p, [&](auto way) {
      sums = sections.add<SimilaritySums>(p.standardize ? p.b * p.heads * way.plan(p).blocks : 0);
    });
  }
};

inline void outlier_degree_cuda(const OutlierDegreeParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  if (heads * p.n == 0) return;
  Sections sections{workspace};
  SimilaritySums* const sums = OutlierDegreeMemory(p, sections).sums;
  with_way(p, [&](auto way) {
    const DegreePlan plan = way.plan(p);
    with_pages<typename decltype(way)::Stored>(p.k, [&](auto paged) {
      launch<similarity_kernel<decltype(way), paged>>(grid_of(heads * plan.blocks), kDegreeThreads, plan.shared, stream,
                                                      p, plan, sums, aligned_rows(p.k, p.b, p.heads, p.n));
    });
    if (!p.standardize) return;
    constexpr int64_t tokens = kDegreeThreads * kStandardTokens;
    const int64_t blocks = (p.n + tokens - 1) / tokens;
    launch<standardize_kernel>(grid_of(heads * blocks), kDegreeThreads, 0, stream, p, plan, sums,
                               static_cast<unsigned>(blocks));
  });
}

}  // namespace
}  // namespace kvops
