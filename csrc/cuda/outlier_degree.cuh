// outlier_degree: how little a key looks like its neighbours.
//
//   S(i)     = mean over the valid j with |i - j| <= kappa of cos(k_i, k_j)
//   Theta(i) = (E[S] - S(i)) / sqrt(Var[S])
//
// Bytes that must move: K once. A key is needed four times: for its norm, when the window's head reaches it, when it is
// in the middle, and when the tail leaves it. The last three times L1 has it, as a block's keys are few.
//
// similarity: kLanes lanes share a row, and each such group walks a run of tokens with the sum of the window's unit
// keys in registers: plus the key that comes, minus the one that goes, dot the one in the middle. A run is as long as
// kappa (16 at least), so that the keys before its first token are at most twice its own: the time per token does not
// grow with kappa. Before that the block writes what makes its keys unit vectors to shared memory, for kappa keys on
// either side too. It leaves the sum of its similarities and of their squares, in double: they lie in [-1, 1], so a
// variance of 1e-12, below which they count as all alike, is still far above double's rounding. The last block of a
// head to finish adds these up in their order. standardize, where it is wanted, turns the similarities to outlier
// degrees.
//
// Keys whose squared norm is not a comfortable float get it in double, and are made unit vectors in two steps.
//
// Blocks of a padded row are counted from its first valid slot, and the slots before that come last, as if the cache
// were a ring. No result depends on the grid, but on kappa and the head dim. Not yet measured on a GPU.
#pragma once
#include "../ops/outlier_degree.h"
#include "rows.cuh"

namespace kvops {
namespace {

constexpr int kDegreeThreads = 128, kDegreeWarps = kDegreeThreads / 32;

// What similarities add up to.
struct SimilaritySums {
  double count, sum, squares;

  __device__ void add(double others, double their_sum, double their_squares) {
    count += others;
    sum += their_sum;
    squares += their_squares;
  }
};

// The sums of all threads, in an order that depends on nothing. The first thread gets them; all have passed a barrier.
template <int kLanes>
__device__ inline SimilaritySums block_sums(SimilaritySums x) {
  __shared__ SimilaritySums of_warps[kDegreeWarps];
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2)
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
  int run, tokens;  // tokens of a lane group, and of a block
  int64_t blocks;   // of a head
  int64_t shared;   // bytes

  template <class Lanes>
  static DegreePlan of(const OutlierDegreeParams& p, Lanes) {
    const int run = p.kappa > 16 ? static_cast<int>(p.kappa) : 16, tokens = run * (kDegreeThreads / Lanes::kLanes);
    return {run, tokens, (p.n + tokens - 1) / tokens, 4 * (tokens + 2 * p.kappa)};
  }
};

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
  const char* rows;
  int64_t stride;
  int pieces;
  int begin, end;  // those that there are
  float* factors;  // of these, in shared memory

  __device__ bool has(int token) const { return begin <= token && token < end; }

  __device__ void load(int token, float (&x)[kValues]) const {
    RowPieces<T, Lanes> row;
    row.template load<kWide>(rows + (has(token) ? token : 0) * stride, has(token) ? pieces : 0);
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

// fn(token, its similarity) for the run from `first` on; NaN where there is none.
template <class Keys, class Lanes, class Fn>
__device__ inline void walk(const Keys& keys, Lanes, int first, int run, int kappa, const Fn& fn) {
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
    fn(token, usable ? total / static_cast<float>(neighbours) : CUDART_NAN_F);
  }
}

template <class T, class Lanes>
__global__ void __launch_bounds__(kDegreeThreads)
    similarity_kernel(OutlierDegreeParams p, DegreePlan plan, SimilaritySums* partial_sums, Standard* standards,
                      unsigned* counters, bool wide) {
  DYNAMIC_SHARED(float, factors);  // [tokens + 2 kappa]
  __shared__ bool is_last;
  const int64_t row = blockIdx.x / plan.blocks, block = blockIdx.x % plan.blocks, b = row / p.heads, h = row % p.heads;
  const int start = static_cast<int>(p.slots.first(b)), count = static_cast<int>(p.slots.count(b));
  const int n = static_cast<int>(p.n), kappa = static_cast<int>(p.kappa);
  const int first = static_cast<int>(block) * plan.tokens;
  float* const scores = p.scores + row * p.n;
  const auto slot_of = [&](int token) { return token < n - start ? start + token : start + token - n; };
  if (first >= count)
    for (int token = first + threadIdx.x; token < min(first + plan.tokens, n); token += kDegreeThreads)
      scores[slot_of(token)] = CUDART_NAN_F;
  const int needed = count > plan.tokens ? (count + plan.tokens - 1) / plan.tokens : 1;
  if (block >= needed) return;

  SimilaritySums sums{};
  const auto all = [&](auto rows_are_wide) {
    const Neighbours<T, Lanes, decltype(rows_are_wide)::value> keys{p.k.row(b, h, start),
                                                                    p.k.stride_n,
                                                                    static_cast<int>(p.d) / kPiece<T>,
                                                                    max(first - kappa, 0),
                                                                    min(first + plan.tokens + kappa, count),
                                                                    factors};
    keys.make_factors();
    __syncthreads();  // all factors are there
    walk(keys, Lanes{}, first + threadIdx.x / Lanes::kLanes * plan.run, plan.run, kappa, [&](int token, float x) {
      if (x == x) sums.add(1, x, static_cast<double>(x) * x);
      if (threadIdx.x % Lanes::kLanes == 0 && token < n) scores[slot_of(token)] = x;
    });
  };
  wide ? all(std::true_type{}) : all(std::false_type{});
  if (!p.standardize) return;

  sums = block_sums<Lanes::kLanes>(sums);
  if (threadIdx.x == 0) {
    partial_sums[row * plan.blocks + block] = sums;
    __threadfence();
    is_last = atomicAdd(counters + row, 1u) == static_cast<unsigned>(needed) - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  sums = {};
  for (int i = threadIdx.x; i < needed; i += kDegreeThreads) {
    const double* const x = reinterpret_cast<const double*>(partial_sums + row * plan.blocks + i);
    sums.add(__ldcg(x), __ldcg(x + 1), __ldcg(x + 2));
  }
  sums = block_sums<1>(sums);
  if (threadIdx.x == 0) standards[row] = Standard::of(sums);
}

__global__ void __launch_bounds__(256)
    standardize_kernel(float* scores, const Standard* standards, int64_t n, unsigned blocks) {
  const int64_t row = blockIdx.x / blocks, i = blockIdx.x % blocks * int64_t{256} + threadIdx.x;
  if (i >= n) return;
  const Standard of = standards[row];
  scores[row * n + i] = static_cast<float>((of.mean - scores[row * n + i]) * of.scale);
}

// fn(T{}, Lanes{}, plan) for the call.
template <class Fn>
inline void with_degree_plan(const OutlierDegreeParams& p, const Fn& fn) {
  with_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_lanes<T>(p.d / kPiece<T>, [&](auto lanes) { fn(type, lanes, DegreePlan::of(p, lanes)); });
  });
}

struct OutlierDegreeMemory {
  SimilaritySums* sums;  // [b, Hk, blocks]
  Standard* standards;   // [b, Hk]
  unsigned* counters;    // [b, Hk]

  OutlierDegreeMemory(const OutlierDegreeParams& p, Sections& sections) {
    int64_t heads = p.standardize ? p.b * p.heads : 0, blocks = 0;
    with_degree_plan(p, [&](auto, auto, const DegreePlan& plan) { blocks = plan.blocks; });
    sums = sections.add<SimilaritySums>(heads * blocks);
    standards = sections.add<Standard>(heads);
    counters = sections.add<unsigned>(heads);
  }
};

inline void outlier_degree_cuda(const OutlierDegreeParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  if (heads * p.n == 0) return;
  with_degree_plan(p, [&](auto type, auto lanes, const DegreePlan& plan) {
    Sections sections{workspace};
    const auto [sums, standards, counters] = OutlierDegreeMemory(p, sections);
    if (p.standardize) zero_async(counters, 4 * heads, stream);
    launch<similarity_kernel<decltype(type), decltype(lanes)>>(grid_of(heads * plan.blocks), kDegreeThreads,
                                                               plan.shared, stream, p, plan, sums, standards, counters,
                                                               aligned_rows(p.k, p.b, p.heads, p.n));
    if (!p.standardize) return;
    const int64_t blocks = (p.n + 255) / 256;
    launch<standardize_kernel>(grid_of(heads * blocks), 256, 0, stream, p.scores, standards, p.n,
                               static_cast<unsigned>(blocks));
  });
}

}  // namespace
}  // namespace kvops
