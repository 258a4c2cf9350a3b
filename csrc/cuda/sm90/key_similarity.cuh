// The search of key_similarity for Hopper: for each key, the last other one whose cosine with it is above the
// threshold.
//
// The keys of a block and the panels are packed keys (../key_similarity.cuh), the panels from the end of the row on.
// Whether a panel has a similar key at all takes two instructions per product: a multiplication by the inverse norm,
// and a maximum. Only a thread that has found one looks at its products one by one. For a panel at d = 128, a
// multiprocessor of an H200 needs 1024 cycles of wgmma and about 400 of the rest. Once all keys of the block have found
// one, the producer ends the pass.
//
// Not yet run on a GPU.
#pragma once
#include "../last_similar.cuh"
#include "panels.cuh"

namespace kvops::sm90 {
namespace {

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    last_similar_sm90_kernel(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap others,
                             const KeySimilarityParams p, int64_t rows, const float* inverses, Spared* spared,
                             int blocks) {
  using Pass = Panels<T, kDim>;
  constexpr int kPanel = Pass::kPanel;
  static_assert(kPackedRows % kPanel == 0 && kPackedRows % kBlockKeys == 0);
  const int unit = static_cast<int>(blockIdx.x) / blocks, first = static_cast<int>(blockIdx.x) % blocks * kBlockKeys;
  const int count = static_cast<int>(p.slots.count(unit / p.heads)), panels = (count + kPanel - 1) / kPanel;
  if (first >= count) return;
  Pass pass(aligned_shared());
  const auto row_of = [&](int i) { return (panels - 1 - i) * kPanel; };

  if (threadIdx.x >= kConsumers) {  // the producer
    if (threadIdx.x == kConsumers) pass.copy(keys, {first, unit, 0}, others, unit, panels, row_of);
    return;
  }

  const int thread = threadIdx.x % 128, own = first + static_cast<int>(threadIdx.x) / 128 * kRows;
  const float* const inverse = inverses + unit * rows;
  LastSimilar key[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int its = own + Accumulator::row(thread, 2 * r);
    key[r] = {its < count ? inverse[its] : 0.0f};
  }
  // Whether all of the warp's keys have found one. The four lanes that share two keys have each met other rows.
  bool found = false;
  const auto look_around = [&] {
    int searching = (key[0].searches() ? 1 : 0) | (key[1].searches() ? 2 : 0);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) searching &= __shfl_xor_sync(kWarp, searching, step);
    found = __all_sync(kWarp, searching == 0);
    if (found) pass.leave();
  };
  look_around();
  pass.multiply(panels, [&](const typename Pass::Products& x, int i) {
    if (found) return;
    // Calls fn(product, the other key, 0 or 1) with this thread's products.
    const auto for_products = [&](const auto& fn) {
#pragma unroll
      for (int j = 0; j < kPanel / 2; j += 4) {
        const int other = row_of(i) + Accumulator::column(thread, j);
        const float2 its = *reinterpret_cast<const float2*>(inverse + other);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          fn(x[j + 2 * r] * its.x, other, r);
          fn(x[j + 2 * r + 1] * its.y, other + 1, r);
        }
      }
    };
    float largest[2] = {};  // a threshold is at least 0; fmaxf() ignores NaN
    for_products([&](float product, int, int r) { largest[r] = fmaxf(largest[r], product); });
    const bool maybe = key[0].may_be(largest[0], p.threshold) || key[1].may_be(largest[1], p.threshold);
    if (maybe)
      for_products([&](float product, int other, int r) {
        key[r].meet(product, other, own + Accumulator::row(thread, 2 * r), p.threshold);
      });
    if (__any_sync(kWarp, maybe)) look_around();
  });
  spare_last(key, spared + unit * rows);
}

// Returns false, without doing anything, if it does not support the call.
inline bool last_similar_hopper(const KeySimilarityParams& p, const KVView& keys, DType dtype, int64_t rows,
                                const float* inverses, Spared* spared, cudaStream_t stream) {
  if (!serves(dtype, p.d, rows)) return false;
  const int64_t heads = p.b * p.heads, blocks = (p.n + kBlockKeys - 1) / kBlockKeys;
  const MappedRows packed = {keys, 1, heads, rows};
  return with_panels(dtype, p.d, packed, packed, [&](auto element, auto dim, const auto& own, const auto& others) {
    constexpr int kDim = decltype(dim)::value;
    launch<last_similar_sm90_kernel<decltype(element), kDim>>(grid_of(heads * blocks), kThreads,
                                                              PanelsShared<kDim>::kBytes + 1024, stream, own, others, p,
                                                              rows, inverses, spared, static_cast<int>(blocks));
  });
}

}  // namespace
}  // namespace kvops::sm90
