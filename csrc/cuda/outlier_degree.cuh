// outlier_degree: how dissimilar a key is from its neighbours.
//
//   S(i)     = mean over the valid j with |i - j| <= kappa of cos(k_i, k_j)
//   Theta(i) = (E[S] - S(i)) / sqrt(Var[S])
//
// Bytes that must move: K once; the scores are small. 8 heads of 131072 keys, d = 128, in bf16 are 268 MB: 56 us on an
// H200. In that time, at 1.8 GHz, each of its 528 schedulers can issue 50 instructions per token it handles.
//
// Band, for kappa up to 8, so for the default of 5. The similarities are a band of K K^T, which tensor cores compute. A
// warp processes a run of keys, 8 at a time. These 8 keys are the columns of a product whose rows are the previous 8
// keys and the 8 keys themselves, so every pair in a band of 8 is covered, and no pair twice. Each key is thus read
// once, in whole pieces; its neighbours' words are still in registers. Every 16 channels of 8 keys take one mma.sync: 1
// per token for d = 128. Norms are the diagonal of the product, so keys enter unnormalized and the products are scaled
// afterwards; each counts for both of its keys. fp32 is split into three bf16 parts, at 6 mma.sync instead of 1: all
// products of parts except those below 2^-21 of the whole, which shorten a cosine's numerator as much as its
// denominator. There is no barrier. A ring in shared memory, of which each lane reads only its own copies, keeps the
// next three steps (two, if rows are wider than 256 bytes) in flight: 96 KiB per multiprocessor of an H200 with bf16
// rows of 256 bytes, 64 KiB with wider ones. A run of 64 keys processes 80, of which 2 kappa come from L2.
//
// Walk, for larger kappa and for rows of more than 512 bytes. The time per token does not grow with kappa. kLanes lanes
// share a row, and each such lane group walks a run of tokens with the sum of the window's unit keys in registers: add
// the key that enters, subtract the key that leaves, take the dot product with the key in the middle. A run is as long
// as kappa (at least 16), so the keys before its first token are at most twice its own. Before that, the block writes
// the factors that normalize its keys to shared memory, including kappa keys on either side. Walk reads each key four
// times, three of them from L1 or L2.
//
// Instruction counts from the code for sm_90a, d = 128: Band takes 169 warp instructions per 8 bf16 keys, so with the
// 80 keys that a run of 64 processes, 26 per token; in fp32, which has twice the time, 81. Walk took 149 in bf16 at
// kappa 5. The prediction for Band in bf16 is 80 % of the memory floor: DRAM at 90 % of its rate, 4 us for the first
// and last runs, 4 us for standardize. A kappa of 9 to 16 would need twice the products, and registers for 8 more keys.
//
// Keys whose squared norm is outside the safe fp32 range are rare. Band finds them on the diagonal and redoes their 8
// keys, with these rows scaled by powers of two. Walk computes their norms in double, and normalizes them in two steps.
//
// If standardize is requested, each block stores the sum of its similarities and the sum of their squares in double.
// Similarities lie in [-1, 1], so a variance of 1e-12, below which they count as equal, is still far above double's
// rounding. A second kernel, each of whose blocks adds up all these sums in the same order, turns the similarities into
// outlier degrees.
//
// Blocks of a padded row start at its first valid slot, and the slots before that come last, as if the cache were a
// ring. Results depend on kappa and the head dim, but not on the grid.
#pragma once
#include "../ops/outlier_degree.h"
#include "async.cuh"
#include "math.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace kvops {
namespace {

constexpr int kDegreeThreads = 128, kDegreeWarps = kDegreeThreads / 32;

// ---- From similarities to degrees ----

// Sums over similarities.
struct SimilaritySums {
  double count, sum, squares;

  __device__ void add(double others, double their_sum, double their_squares) {
    count += others;
    sum += their_sum;
    squares += their_squares;
  }
};

// The sums over all threads, in a fixed order. All threads get the result, and have passed a barrier.
__device__ inline SimilaritySums block_sums(SimilaritySums x) {
  __shared__ SimilaritySums of_warps[kDegreeWarps];
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    x.add(__shfl_xor_sync(kWarp, x.count, step), __shfl_xor_sync(kWarp, x.sum, step),
          __shfl_xor_sync(kWarp, x.squares, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();  // the warps' sums are written
  x = of_warps[0];
  for (int i = 1; i < kDegreeWarps; ++i) x.add(of_warps[i].count, of_warps[i].sum, of_warps[i].squares);
  return x;
}

// Standardization of similarities: (mean - x) * scale.
struct Standard {
  double mean, scale;

  __device__ static Standard of(const SimilaritySums& x) {
    const double mean = x.sum / x.count, variance = x.squares / x.count - mean * mean;
    const double flat = static_cast<double>(kFlatSimilarity) * kFlatSimilarity;
    return {mean, variance > flat ? 1 / sqrt(variance) : 0.0};
  }
};

// How a call is divided.
struct DegreePlan {
  int run, tokens;  // tokens per warp or lane group, and per block
  unsigned blocks;  // per head
  int64_t shared;   // bytes

  static DegreePlan of(const OutlierDegreeParams& p, int run, int runs, int64_t shared) {
    const int tokens = run * runs;
    return {run, tokens, static_cast<unsigned>((p.n + tokens - 1) / tokens), shared};
  }
};

// A head's keys, counted from the first valid slot.
struct HeadKeys {
  HeadRows rows;
  int pieces, count, kappa;
  bool wide;
};

// ---- Small kappa: products on tensor cores ----

constexpr int kBandKeys = 8;  // keys per step, and therefore the largest kappa

template <int kTurn>
using TurnOf = std::integral_constant<int, kTurn>;

// The operands of a warp: 8 keys and the 8 before them, which alternate as rows 0-7 and 8-15 of the tensor core's A;
// the columns of its B are the 8 newer keys. A lane loads whole pieces, of key l / 4 pieces l % 4 + 4 i, and uses their
// words as they are, since the order of a dot product's terms is free. fp32 is split into three bf16 parts, which
// together hold its 24 bits.
template <class T, int kPieces>
struct BandKeys {
  using Product = std::conditional_t<sizeof(T) == 4, BFloat16, Value<T>>;
  static constexpr int kParts = sizeof(T) == 4 ? 3 : 1, kSteps = sizeof(T) == 4 ? 1 : 2;  // kSteps: products per piece
  static constexpr unsigned kHigh = 0xffff0000u;  // mask that truncates a float to bf16
  unsigned rows[kParts][kPieces * kSteps][4];

  // Replaces the older keys by new ones.
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

  // before[e]: the product of key l / 4 of the previous ones with key 2 (l % 4) + e; own[e]: that of key l / 4 of the
  // new ones.
  template <int kTurn>
  __device__ void multiply(int pieces, float (&before)[2], float (&own)[2]) const {
    constexpr int kSums = kParts == 1 ? 2 : kParts;  // separate sums by size of the terms; or for even and odd steps
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

// Makes a rare row ordinary, with its lanes together: zeros if it is not finite, and scaled by a power of two, which
// changes no cosine, if its squared norm might be outside the safe range. Returns whether it was finite.
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
  const unsigned exponent = max(__float_as_uint(most) >> 23, 1u);  // puts the scaled row's largest element in [2, 4)
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

// Warps work independently, without barriers. In each step, 8 keys are multiplied with themselves and the 8 before. The
// keys of the next steps are on their way to shared memory, where each lane reads only its own copies.
template <class T, int kPieces>
struct Band {
  using Stored = T;
  static constexpr int kBlocks = kPieces == 8 ? 2 : sizeof(T) < 4 ? 4 : 3;
  static constexpr int kRun = 64;                          // keys per warp, a multiple of 32
  static constexpr int kStages = kPieces == 4 ? 4 : 3;     // of the ring
  static constexpr int kStage = kPieces * kDegreeThreads;  // pieces

  static DegreePlan plan(const OutlierDegreeParams& p) {
    return DegreePlan::of(p, kRun, kDegreeWarps, int64_t{16} * kStages * kStage);
  }

  // Calls fn(token, similarity) for the block's tokens from `block` on, once per token, from one thread.
  template <class Fn>
  __device__ static void similarities(const HeadKeys& keys, const DegreePlan&, int block, const Fn& fn) {
    // Taken from lane 0, so that the compiler sees that it is uniform in the warp.
    const int first = block + __shfl_sync(kWarp, static_cast<int>(threadIdx.x) / 32, 0) * kRun;
    if (first >= keys.count) return;
    // From here on keys count from `first`. Those in [begin, end) exist.
    const int kappa = keys.kappa, begin = max(-kappa, -first), end = min(kRun + kappa, keys.count - first);
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    const bool diagonal = lane % 4 == lane / 8;  // among a row's four lanes, the one with its product with itself
    const auto near = [&](int distance) { return -kappa <= distance && distance <= kappa ? 1.0f : 0.0f; };
    const float near_before[2] = {near(kBandKeys + column - row), near(kBandKeys + column + 1 - row)};
    const float near_own[2] = {near(column - row), near(column + 1 - row)};

    HeadRows pieces = keys.rows.from(first);
    pieces.data += lane % 4 * kPieceBytes<T>;
    const int count = keys.pieces - lane % 4;  // the lane has every fourth piece of a key
    uint4 raw[kPieces];
    DYNAMIC_SHARED(uint4, memory);  // [kStages, kPieces, threads]
    uint4* const ring = memory + threadIdx.x;
    int stage = 0;  // of the keys at hand; the stage before it is free
    // Starts copying this lane's key of the 8 from `at` on; if it does not exist, the nearest one.
    const auto fetch = [&](int at, int to) {
      const char* const from = pieces.row(min(max(at + row, begin), end - 1));
      uint4* const own = ring + to * kStage;
      const int there = at <= kRun ? count : 0;
      if (keys.wide) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (4 * i < there) copy_piece<T, true>(own + i * kDegreeThreads, from + 4 * kPieceBytes<T> * i);
      } else {
#pragma unroll 1
        for (int i = 0; 4 * i < there; ++i)
          copy_piece<T, false>(own + i * kDegreeThreads, from + 4 * kPieceBytes<T> * i);
      }
      end_copies();
    };
    const auto load = [&] {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) raw[i] = widen<T>(ring[stage * kStage + i * kDegreeThreads]);
    };

    BandKeys<T, kPieces> both = {};
    float sum_before = 0, factor_before = 0;  // key `row` of the previous 8: the sum of its similarities so far
    unsigned usable = 0;                      // bits: of the 8 keys before the previous ones, of those, and of these
    float total = 0;                          // for the token that this lane writes; its neighbours start at bit 0
    unsigned neighbours = 0;
    const auto meet = [&](auto turn, int at) {
      constexpr int kTurn = decltype(turn)::value;
      unsigned there = 0xffu << max(begin - at, 0) & 0xffu >> min(max(at + kBandKeys - end, 0), 8);
      fetch(at + (kStages - 1) * kBandKeys, stage == 0 ? kStages - 1 : stage - 1);
      wait_for_copies<kStages - 1>();
      float back[2], here[2], squares;
      for (bool rare = false;; rare = true) {
        load();
        if (rare) {
          there &= ~__reduce_or_sync(kWarp, mend_row<T>(raw) ? 0u : 1u << row);
        }
        both.template take<kTurn>(raw);
        both.template multiply<kTurn>(keys.pieces, back, here);
        squares = row % 2 ? here[1] : here[0];
        if (rare || !__any_sync(kWarp, diagonal && !comfortable(squares))) break;
      }
      const float factor =
          there >> row & 1 && squares > 0 ? rsqrt_fast(squares) : 0.0f;  // of key `row`, on the diagonal
      const float of_row = __shfl_sync(kWarp, factor, 4 * row + lane / 8);
      float sum = 0, of_keys[2];  // sum for key `row`; for keys `column` and the next, with the previous 8
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_column = __shfl_sync(kWarp, factor, 9 * (lane % 4) + 4 * e);
        back[e] *= near_before[e];
        sum_before = fmaf(back[e], of_column, sum_before);
        sum = fmaf(here[e] * near_own[e], of_column, sum);
        of_keys[e] = back[e] * factor_before;
      }
      // Add over the rows. Odd rows add up the second column's, so that a key's sum arrives on its diagonal.
      float of_key = (row % 2 ? of_keys[1] : of_keys[0]) + __shfl_xor_sync(kWarp, row % 2 ? of_keys[0] : of_keys[1], 4);
      of_key += __shfl_xor_sync(kWarp, of_key, 8);
      of_key += __shfl_xor_sync(kWarp, of_key, 16);
      if (diagonal) sum += of_key;
      // The previous keys are done. Four times 8 of them make one per lane.
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
      stage = stage + 1 == kStages ? 0 : stage + 1;
    };
#pragma unroll 1
    for (int i = 0; i < kStages * kPieces; ++i)  // pieces that no key has
      if (4 * (i % kPieces) >= count) ring[i * kDegreeThreads] = uint4{};
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch((i - 1) * kBandKeys, i);
#pragma unroll 1
    for (int at = -kBandKeys; at <= kRun; at += 2 * kBandKeys) {
      meet(TurnOf<0>{}, at);
      meet(TurnOf<1>{}, at + kBandKeys);
    }
  }
};

// ---- Any kappa: sums of unit keys ----

// The factor that normalizes a key: 0 for a zero key, NaN for a non-finite one. If it is negative, first scale by 2^44
// or 2^-44, then by its absolute value; this is for keys where the combined factor would not be a float.
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

// The keys around a block, as its lane groups read them, indexed by token of the row.
template <class T, class Lanes, bool kWide>
struct Neighbours {
  static constexpr int kValues = RowPieces<T, Lanes>::kValues;
  HeadRows rows;
  int pieces;
  int begin, end;  // the existing ones
  float* factors;  // their factors, in shared memory

  __device__ bool has(int token) const { return begin <= token && token < end; }

  __device__ void load(int token, float (&x)[kValues]) const {
    RowPieces<T, Lanes> row;
    row.template load<kWide>(rows.row(has(token) ? token : 0), has(token) ? pieces : 0);
    row.values(x);
  }

  // Called by the whole block; a barrier must follow.
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

  // Gets a key and its factor, both 0 if it is no neighbour of any token. Returns whether it is one.
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

  // Calls fn(token, similarity) for the block's tokens from `first` on, once per token, from one thread.
  template <class Fn>
  __device__ static void similarities(const HeadKeys& keys, const DegreePlan& plan, int first, const Fn& fn) {
    DYNAMIC_SHARED(float, factors);  // [tokens + 2 kappa]
    const auto all = [&](auto rows_are_wide) {
      const Neighbours<T, Lanes, decltype(rows_are_wide)::value> around{
          keys.rows, keys.pieces, max(first - keys.kappa, 0), min(first + plan.tokens + keys.kappa, keys.count),
          factors};
      around.make_factors();
      __syncthreads();  // all factors are written
      walk(around, first + static_cast<int>(threadIdx.x) / Lanes::kLanes * plan.run, plan.run, keys.kappa, fn);
    };
    keys.wide ? all(std::true_type{}) : all(std::false_type{});
  }

  template <class Keys, class Fn>
  __device__ static void walk(const Keys& keys, int first, int run, int kappa, const Fn& fn) {
    constexpr int kValues = Keys::kValues;
    float sum[kValues] = {}, x[kValues], factor;  // sum: of the window's unit keys
    int neighbours = 0;                           // the number of keys in it
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

// ---- Kernels ----

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
  __syncthreads();  // the block's similarities are written
  SimilaritySums sums{};
  for (int token = first + threadIdx.x; token < min(first + plan.tokens, count); token += kDegreeThreads) {
    const float x = scores[slot_of(token)];
    if (x == x) sums.add(1, x, static_cast<double>(x) * x);
  }
  sums = block_sums(sums);
  if (threadIdx.x == 0) partial_sums[blockIdx.x] = sums;
}

constexpr int kStandardTokens = 16;  // per thread

// Every block adds up its head's sums, in order.
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

// Calls fn(Band or Walk), whichever serves the call.
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
