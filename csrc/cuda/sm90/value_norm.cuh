// The pass of value_norm for Hopper: for each value and query head, the sum of the magnitudes of the value's products
// with the head's rows of W_O.
//
// The keys of a block are values here, and the panels are rows of W_O, which TMA reads where they are. Rows past the
// last one arrive as zeros. A thread adds up its part of each panel, then the panels, then four threads theirs. A
// product takes one instruction beside wgmma.
//
// Not yet run on a GPU.
#pragma once
#include "../reduce.cuh"
#include "panels.cuh"

namespace kvops::sm90 {
namespace {

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    query_head_norms_sm90_kernel(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap weights,
                                 const ValueNormParams p, float* norms, int blocks) {
  using Pass = Panels<T, kDim>;
  constexpr int kPanel = Pass::kPanel;
  const int unit = static_cast<int>(blockIdx.x) / blocks, first = static_cast<int>(blockIdx.x) % blocks * kBlockKeys;
  const int query_heads = static_cast<int>(p.heads * p.group), batch = unit / query_heads, head = unit % query_heads;
  const int count = static_cast<int>(p.slots.count(batch)), hidden = static_cast<int>(p.hidden);
  const int panels = (hidden + kPanel - 1) / kPanel;
  if (first >= count) return;
  Pass pass(aligned_shared());

  if (threadIdx.x >= kConsumers) {  // the producer
    if (threadIdx.x == kConsumers)
      pass.copy(values, {static_cast<int>(p.slots.first(batch)) + first, head / static_cast<int>(p.group), batch},
                weights, head, panels, [](int i) { return i * kPanel; });
    return;
  }

  const int thread = threadIdx.x % 128, own = first + static_cast<int>(threadIdx.x) / 128 * kRows;
  float total[2] = {};
  pass.multiply(panels, [&](const typename Pass::Products& x, int) {
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < kPanel / 2; ++j) sum[j / 2 % 2] += fabsf(x[j]);
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] += sum[r];
  });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float norm = lanes_sum<4>(total[r]);
    const int its = own + Accumulator::row(thread, 2 * r);
    if (thread % 4 == r && its < count) norms[unit * p.n + its] = norm;
  }
}

// Returns false, without doing anything, if it does not support the call.
inline bool query_head_norms_hopper(const ValueNormParams& p, float* norms, cudaStream_t stream) {
  if (!serves(p.dtype, p.dv, p.n) || p.hidden == 0) return false;
  const int64_t query_heads = p.heads * p.group, blocks = (p.n + kBlockKeys - 1) / kBlockKeys;
  const KVView w_o{const_cast<char*>(p.w_o), 0, p.v.row_bytes, p.w_stride, p.v.row_bytes};
  const MappedRows values = {p.v, p.b, p.heads, p.n}, weights = {w_o, 1, query_heads, p.hidden};
  return with_panels(p.dtype, p.dv, values, weights, [&](auto element, auto dim, const auto& own, const auto& others) {
    constexpr int kDim = decltype(dim)::value;
    launch<query_head_norms_sm90_kernel<decltype(element), kDim>>(grid_of(p.b * query_heads * blocks), kThreads,
                                                                  PanelsShared<kDim>::kBytes + 1024, stream, own,
                                                                  others, p, norms, static_cast<int>(blocks));
  });
}

}  // namespace
}  // namespace kvops::sm90
