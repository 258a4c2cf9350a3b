// CriticalKV's value norms: the L1 norm of each value after the output projection.
//
//   norm_i = mean (or max, sum) over the group's query heads h of sum over c of |W_O[c, h] . v_i|
//
// The work is 2 n Hq hidden dv FLOP, as much as the output projection of n tokens: with 32 query heads, hidden 4096 and
// dv = 128, 1.1 TFLOP for 32768 tokens, 1.1 ms on an H200 at the rate of wgmma; mma.sync reaches about 60 % of that
// rate. The [n, hidden] products are never written.
//
// query_head_norms: a block has 128 or 256 values and one query head. Its warps hold 16 or 32 values each in registers,
// straight from V, and panels of W_O pass by in shared memory (panels.cuh). A lane adds up the magnitudes of its
// products, 64 output channels at a time; at the end the four lanes that share a value add theirs. Hopper has a kernel
// of its own for this pass (sm90/value_norm.cuh). group_norms reduces over the group, and redoes a result that is not
// finite in double, by the whole warp: it is NaN if the value is not finite, and infinity on overflow. In the portable
// kernel, the order of all sums depends on the shape alone.
#pragma once
#include "../ops/value_norm.h"
#include "panels.cuh"
#include "reduce.cuh"
#include "sm90/hopper.h"

namespace kvops {
namespace {

struct ValueNormMemory {
  float* norms;  // [b, Hq, n]

  ValueNormMemory(const ValueNormParams& p, Sections& sections)
      : norms(sections.add<float>(p.b * p.heads * p.group * p.n)) {}
};

// A piece of the weights of T, which may lie at any address.
template <class E>
__device__ inline void load_weights(uint4* to, const char* from, bool there, bool wide) {
  if (wide)
    copy_async(to, from, there);
  else
    *to = there ? load_raw<E, false>(from) : uint4{};
}

template <class T, int kPieces, bool kPaged>
__global__ void __launch_bounds__(kPanelThreads, kPieces == 4 ? 2 : 1)
    query_head_norms_kernel(ValueNormParams p, float* norms, PanelPlan plan, unsigned blocks, bool wide,
                            bool wide_weights) {
  using Values = KeyTile<T, kPieces>;
  using E = Value<T>;
  constexpr int kOwn = Values::kOwn, kBlocks = Values::kBlocks;
  DYNAMIC_SHARED(char, memory);
  const int64_t row = blockIdx.x / blocks, query_heads = p.heads * p.group;  // row: of b Hq
  const int64_t b = row / query_heads, query_head = row % query_heads;
  const int count = static_cast<int>(p.slots.count(b)), hidden = static_cast<int>(p.hidden);
  const int first = static_cast<int>(blockIdx.x % blocks) * kPanelWarps * Values::kKeys;
  if (first >= count) return;
  const int lane = threadIdx.x % 32, value = first + static_cast<int>(threadIdx.x) / 32 * Values::kKeys;
  const int left = count - value;
  const HeadRows own = head_rows<kPaged, T>(p.v, b, query_head / p.group).from(p.slots.first(b) + value);

  Values values;
  values.load(own, left, static_cast<int>(p.v.row_bytes / 16), 0, wide);
  float total[kOwn] = {}, sum[kOwn] = {};
  const int of_row = plan.row_bytes / 16, pieces = static_cast<int>(p.v.row_bytes / 16);
  const auto load = [&](int i, char* panel) {
    for (int x = threadIdx.x; x < plan.rows * of_row; x += kPanelThreads) {
      const int c = i * plan.rows + x / of_row, piece = x % of_row;
      const bool there = c < hidden && piece < pieces;
      load_weights<E>(reinterpret_cast<uint4*>(panel + x / of_row * plan.pitch) + piece,
                      p.weights(there ? c : 0, query_head, sizeof(E)) + (there ? 16 * piece : 0), there, wide_weights);
    }
  };
  const auto add = [&](int i, const char* panel) {
#pragma unroll 1
    for (int tile = 0; tile < plan.rows; tile += kTileRows) {
      Products<kBlocks> x;
      multiply_all<T, kPieces, kHoldsRows<T, kPieces>, kPieces == 8>(x, values, p.v.row_bytes, own, left, wide,
                                                                     panel + tile * plan.pitch, plan.pitch);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[2 * m + e / 2] += fabsf(x[m][t][e]);
      if ((i * plan.rows + tile + kTileRows) % kMostPanelRows) continue;
#pragma unroll
      for (int own_value = 0; own_value < kOwn; ++own_value) {
        total[own_value] += sum[own_value];
        sum[own_value] = 0.0f;
      }
    }
    return true;
  };
  for_panels(plan, memory, (hidden + plan.rows - 1) / plan.rows, load, add);

#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float norm = lanes_sum<4>(total[i] + sum[i]);
    const int its = lane / 4 + 8 * i;
    if (lane % 4 == i && its < left) norms[row * p.n + value + its] = norm;
  }
}

// Adds query head g's norm to a result.
template <class Float>
__device__ inline void reduce_group(const ValueNormParams& p, int64_t g, Float norm, Float& result) {
  if (g == 0)
    result = norm;
  else if (p.group_reduce == Reduce::max)
    result = norm > result || norm != norm ? norm : result;
  else
    result += norm;
  if (g == p.group - 1 && p.group_reduce == Reduce::mean) result /= static_cast<Float>(p.group);
}

// The norm of a value in double, by one warp.
template <class T>
__device__ inline float norm_exactly(const ValueNormParams& p, const T* value, int64_t head) {
  using E = Value<T>;
  bool finite = true;
  for (int i = threadIdx.x % 32; i < p.dv; i += 32) finite = finite && is_finite(to_float(value[i]));
  if (!__all_sync(kWarp, finite)) return CUDART_NAN_F;
  double result = 0;
  for (int64_t g = 0; g < p.group; ++g) {
    double norm = 0;
    for (int64_t c = threadIdx.x % 32; c < p.hidden; c += 32) {
      const E* const weights = reinterpret_cast<const E*>(p.weights(c, head * p.group + g, sizeof(E)));
      double product = 0;
      for (int i = 0; i < p.dv; ++i) product += static_cast<double>(to_float(weights[i])) * to_float(value[i]);
      norm += fabs(product);
    }
    reduce_group(p, g, lanes_sum<32>(norm), result);
  }
  return static_cast<float>(result);
}

template <class T, bool kPaged>
__global__ void __launch_bounds__(256) group_norms_kernel(ValueNormParams p, const float* norms, unsigned blocks) {
  const int64_t head = blockIdx.x / blocks, b = head / p.heads;
  const int64_t slot = int64_t{blockIdx.x % blocks} * 256 + threadIdx.x, i = slot - p.slots.first(b);
  const bool valid = 0 <= i && i < p.slots.count(b) && slot < p.n;
  float norm = CUDART_NAN_F;
  for (int64_t g = 0; valid && g < p.group; ++g) reduce_group(p, g, norms[(head * p.group + g) * p.n + i], norm);
  float* const out = p.norms + head * p.n;
  if (slot < p.n) out[slot] = norm;
  unsigned strange = __ballot_sync(kWarp, valid && !is_finite(norm));
  while (strange) {
    const unsigned of = __ffs(static_cast<int>(strange)) - 1;
    const int64_t its_slot = __shfl_sync(kWarp, slot, static_cast<int>(of));
    const T* const value = reinterpret_cast<const T*>(head_rows<kPaged, T>(p.v, b, head % p.heads).row(its_slot));
    const float exact = norm_exactly(p, value, head % p.heads);
    if (threadIdx.x % 32 == of) out[its_slot] = exact;
    strange &= strange - 1;
  }
}

inline void value_norm_cuda(const ValueNormParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  if (heads * p.n == 0) return;
  Sections sections{workspace};
  const ValueNormMemory memory(p, sections);
  const bool wide = aligned_rows(p.v, p.b, p.heads, p.n);
  const bool wide_weights = (reinterpret_cast<uintptr_t>(p.w_o) | static_cast<uint64_t>(p.w_stride)) % 16 == 0;
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const PanelPlan plan = PanelPlan::of(p.v.row_bytes);
    with_pages<T>(p.v, [&](auto paged) {
      with_pieces<T>(p.v.row_bytes, [&](auto pieces) {
        if (sm90::query_head_norms(p, memory.norms, stream)) return;
        constexpr int kPieces = decltype(pieces)::value, kValues = kPanelWarps * KeyTile<T, kPieces>::kKeys;
        const int64_t blocks = (p.n + kValues - 1) / kValues;
        launch<query_head_norms_kernel<T, kPieces, paged>>(
            grid_of(heads * p.group * blocks), kPanelThreads, static_cast<size_t>(plan.stages) * plan.bytes, stream, p,
            memory.norms, plan, static_cast<unsigned>(blocks), wide, wide_weights);
      });
      const int64_t blocks = (p.n + 255) / 256;
      launch<group_norms_kernel<T, paged>>(grid_of(heads * blocks), 256, 0, stream, p, memory.norms,
                                           static_cast<unsigned>(blocks));
    });
  });
}

}  // namespace
}  // namespace kvops
