// KeyDiff's scores.
//
//   mu = sum_j k_j / |k_j|,  score_i = -cos(k_i, mu)
//
// Bytes that must move: K twice, since no score is known before the whole sum is (once when the anchor is given).
//
// Two kernels. anchor_sum: a block sums kTokens keys into one partial sum; the last block of a head to finish (a
// counter tells) adds the partial sums in their order, in double, and writes mu. So no block waits for another and no
// float is added atomically: the sum is the same whatever the order in which blocks run. anchor_score: a block scores
// kTokens slots; blocks go backward over the whole batch, to meet first what the sum read last and L2 still holds.
//
// In both, kLanes lanes share a row and a warp has kUnroll rows of each lane group in flight; mu is in registers.
// Partial sums are 4 d bytes for each kTokens keys, 0.8 % of a bf16 K, written and read once. Blocks of a padded row
// are counted from its first valid slot, so that it sums as it would alone. Not yet measured on a GPU.
//
// Rows whose squared norm is not a comfortable float (zero, NaN, infinite, subnormal) are found by one compare a row
// and done again in double.
#pragma once
#include "../ops/anchor_cosine.h"
#include "rows.cuh"

namespace kvops {
namespace {

constexpr int kAnchorThreads = 256, kAnchorWarps = kAnchorThreads / 32;
constexpr int kTokens = 256;  // for each block

// kUnroll consecutive rows for each of a warp's lane groups, as they were loaded.
template <class T, class Lanes>
struct KeyRows {
  static constexpr int kPieces = Lanes::kPieces, kValues = RowPieces<T, Lanes>::kValues;
  static constexpr int kUnroll = 4 / kPieces > 1 ? 4 / kPieces : 1;
  static constexpr int kRows = kUnroll * Lanes::kRows;                     // of the warp
  static constexpr int kBlocks = kPieces == 1 ? 3 : kPieces == 2 ? 2 : 1;  // on a multiprocessor: caps the registers
  RowPieces<T, Lanes> raw[kUnroll];

  // Rows `first` + [0, kUnroll); those from `end` on are zero.
  __device__ KeyRows(const char* rows, int64_t stride, int pieces, int64_t first, int64_t end, bool wide) {
    if (wide)
      load<true>(rows, stride, pieces, first, end);
    else
      load<false>(rows, stride, pieces, first, end);
  }

  template <bool kWide>
  __device__ void load(const char* rows, int64_t stride, int pieces, int64_t first, int64_t end) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      raw[u].template load<kWide>(rows + (first + u) * stride, first + u < end ? pieces : 0);
  }

  __device__ void row(int u, float (&x)[kValues]) const { raw[u].values(x); }
};

// The first row of this warp's lane group within a block, in step `step`: lane groups hold consecutive runs of rows.
template <class Rows, class Lanes>
__device__ inline int first_row(int step) {
  return threadIdx.x / 32 * (kTokens / kAnchorWarps) + step * Rows::kRows +
         threadIdx.x % 32 / Lanes::kLanes * Rows::kUnroll;
}

template <class T, class Lanes>
__global__ void __launch_bounds__(kAnchorThreads, KeyRows<T, Lanes>::kBlocks)
    anchor_sum_kernel(AnchorCosineParams p, float* partial_sums, unsigned* counters, unsigned blocks, bool wide) {
  using Rows = KeyRows<T, Lanes>;
  DYNAMIC_SHARED(float, shared);  // [warps, d], then [groups, d] doubles
  __shared__ bool is_last;
  const unsigned heads = static_cast<unsigned>(p.heads), b = blockIdx.x / blocks / heads,
                 h = blockIdx.x / blocks % heads;
  const int64_t row = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int64_t count = p.slots.count(b), needed = count > kTokens ? (count + kTokens - 1) / kTokens : 1;
  if (block >= needed) return;  // a shorter row of a padded batch
  const int64_t begin = block * kTokens, end = begin + kTokens < count ? begin + kTokens : count;
  const char* const rows = p.k.row(b, h, p.slots.first(b));
  const int d = static_cast<int>(p.d), pieces = d / kPiece<T>;

  float sum[Rows::kValues] = {};
  for (int step = 0; step < kTokens / kAnchorWarps / Rows::kRows; ++step) {
    const Rows keys(rows, p.k.stride_n, pieces, begin + first_row<Rows, Lanes>(step), end, wide);
#pragma unroll
    for (int u = 0; u < Rows::kUnroll; ++u) {
      float x[Rows::kValues];
      keys.row(u, x);
      const float squares = dot<float, Lanes>(x, x);
      float weight = p.normalize_anchor ? rsqrtf(squares) : 1.0f;
      if (__any_sync(kWarp, !comfortable(squares))) {
        const double exact = dot<double, Lanes>(x, x);
        const bool usable = 0 < exact && exact < CUDART_INF;  // not zero, and finite
        const double scale = p.normalize_anchor ? 1 / sqrt(exact) : 1.0;
        if (!comfortable(squares)) {  // the warp's other rows stay as they are: no row depends on its neighbours
          weight = 1.0f;
#pragma unroll
          for (int i = 0; i < Rows::kValues; ++i) x[i] = usable ? static_cast<float>(x[i] * scale) : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < Rows::kValues; ++i) sum[i] += x[i] * weight;
    }
  }

  // Lane groups, then warps.
#pragma unroll
  for (int i = 0; i < Rows::kValues; ++i) {
#pragma unroll
    for (int step = Lanes::kLanes; step < 32; step *= 2) sum[i] += __shfl_xor_sync(kWarp, sum[i], step);
    if (threadIdx.x % 32 < Lanes::kLanes && channel_of<T, Lanes>(i) < d)
      shared[threadIdx.x / 32 * d + channel_of<T, Lanes>(i)] = sum[i];
  }
  __syncthreads();
  float* const partial = partial_sums + row * blocks * d;
  for (int c = threadIdx.x; c < d; c += kAnchorThreads) {
    float total = 0;
    for (int warp = 0; warp < kAnchorWarps; ++warp) total += shared[warp * d + c];
    partial[block * d + c] = total;
  }

  // The last block of this head to come here sees the partial sums of all others.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(counters + row, 1u) == needed - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const int columns = d / 4, groups = kAnchorThreads / columns, column = threadIdx.x % columns;
  const int group = threadIdx.x / columns;
  double* const totals = reinterpret_cast<double*>(shared);  // [groups, d]
  if (group < groups) {
    double total[4] = {};
    constexpr int kLoads = 4;  // in flight
    for (int64_t i = group; i < needed; i += kLoads * groups) {
      float4 x[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u)
        x[u] = i + u * groups < needed
                   ? __ldcg(reinterpret_cast<const float4*>(partial + (i + u * groups) * d) + column)
                   : float4{};
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        total[0] += x[u].x;
        total[1] += x[u].y;
        total[2] += x[u].z;
        total[3] += x[u].w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) totals[group * d + 4 * column + i] = total[i];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < d; c += kAnchorThreads) {
    double total = 0;
    for (int g = 0; g < groups; ++g) total += totals[g * d + c];
    p.anchor[row * d + c] = static_cast<float>(total);
  }
}

template <class T, class Lanes>
__global__ void __launch_bounds__(kAnchorThreads, KeyRows<T, Lanes>::kBlocks + 1)
    anchor_score_kernel(AnchorCosineParams p, unsigned blocks, bool wide) {
  using Rows = KeyRows<T, Lanes>;
  const unsigned unit = gridDim.x - 1 - blockIdx.x;  // backward
  const unsigned heads = static_cast<unsigned>(p.heads), b = unit / blocks / heads, h = unit / blocks % heads;
  const int64_t row = unit / blocks, begin = static_cast<int64_t>(unit % blocks) * kTokens;
  const int64_t first = p.slots.first(b), last = first + p.slots.count(b);
  const char* const rows = p.k.row(b, h, 0);
  const int d = static_cast<int>(p.d), pieces = d / kPiece<T>, lane = threadIdx.x % Lanes::kLanes;

  const float* const anchor = (p.given_anchor ? p.given_anchor : p.anchor) + row * d;
  if (p.given_anchor && begin == 0)
    for (int c = threadIdx.x; c < d; c += kAnchorThreads) p.anchor[row * d + c] = anchor[c];
  float direction[Rows::kValues];
  double squares = 0;
#pragma unroll
  for (int i = 0; i < Rows::kValues; ++i) {
    direction[i] = channel_of<T, Lanes>(i) < d ? anchor[channel_of<T, Lanes>(i)] : 0.0f;
    squares += static_cast<double>(direction[i]) * direction[i];
  }
  squares = lanes_sum<Lanes::kLanes>(squares);
  const double scale = squares == 0 ? 0.0 : 1 / sqrt(squares);
#pragma unroll
  for (int i = 0; i < Rows::kValues; ++i) direction[i] = static_cast<float>(direction[i] * scale);

  for (int step = 0; step < kTokens / kAnchorWarps / Rows::kRows; ++step) {
    const int64_t slot = begin + first_row<Rows, Lanes>(step);
    const Rows keys(rows, p.k.stride_n, pieces, slot, p.n, wide);
    float score = 0;  // lane u of the group has that of its row u
#pragma unroll
    for (int u = 0; u < Rows::kUnroll; ++u) {
      float x[Rows::kValues];
      keys.row(u, x);
      const float squares = dot<float, Lanes>(x, x);
      float cosine = dot<float, Lanes>(x, direction) * rsqrtf(squares);
      if (__any_sync(kWarp, !comfortable(squares))) {
        const double exact = dot<double, Lanes>(x, x), product = dot<double, Lanes>(x, direction);
        if (!comfortable(squares))
          cosine = exact == 0 ? 0.0f : exact < CUDART_INF ? static_cast<float>(product / sqrt(exact)) : CUDART_NAN_F;
      }
      if (lane == u) score = -cosine;
    }
    if (lane < Rows::kUnroll && slot + lane < p.n)
      p.scores[row * p.n + slot + lane] = first <= slot + lane && slot + lane < last ? score : CUDART_NAN_F;
  }
}

inline int64_t anchor_blocks(const AnchorCosineParams& p) {
  return p.n > kTokens ? (p.n + kTokens - 1) / kTokens : 1;
}

struct AnchorMemory {
  float* partial_sums;  // [b, Hk, blocks, d]
  unsigned* counters;   // [b, Hk]

  AnchorMemory(const AnchorCosineParams& p, Sections& sections) {
    const int64_t heads = p.given_anchor ? 0 : p.b * p.heads;
    partial_sums = sections.add<float>(heads * anchor_blocks(p) * p.d);
    counters = sections.add<unsigned>(heads);
  }
};

inline void anchor_cosine_cuda(const AnchorCosineParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  const unsigned blocks = static_cast<unsigned>(anchor_blocks(p));
  if (heads == 0) return;
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.n);
  Sections sections{workspace};
  const AnchorMemory memory(p, sections);
  with_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_lanes<T>(p.d / kPiece<T>, [&](auto lanes) {
      using Lanes = decltype(lanes);
      if (!p.given_anchor) {
        zero_async(memory.counters, 4 * heads, stream);
        const int64_t floats = 4 * kAnchorWarps * p.d, doubles = 8 * kMaxHeadDim;  // groups * d is at most that
        const int64_t shared = floats > doubles ? floats : doubles;
        launch<anchor_sum_kernel<T, Lanes>>(grid_of(heads * blocks), kAnchorThreads, shared, stream, p,
                                            memory.partial_sums, memory.counters, blocks, wide);
      }
      launch<anchor_score_kernel<T, Lanes>>(grid_of(heads * blocks), kAnchorThreads, 0, stream, p, blocks, wide);
    });
  });
}

}  // namespace
}  // namespace kvops
