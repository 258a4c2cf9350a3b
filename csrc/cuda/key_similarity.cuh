// R-KV's redundancy: the mean cosine of a key with all others, without the pairs that are spared.
//
//   last_i  = the last j != i with cos(k_i, k_j) > threshold, if any
//   score_j = (sum over i != j with last_i != j of cos(k_i, k_j)) / number of keys
//
// The sum over all i is linear: anchor_cosine, which has run before, left the cosine of each key with the sum of the
// unit keys. Only last_i needs products of pairs: 2 n^2 d FLOP per head at most. With 8 heads of 32768 bf16 keys and
// d = 128 that is 2.2 TFLOP, 2.2 ms on an H200 at the rate of wgmma; mma.sync reaches about 60 % of that rate. The
// [n, n] products are never written.
//
// pack_keys copies the valid keys to contiguous rows, widens fp8 to bf16, and computes inverse norms. A key whose
// squared norm is outside the safe fp32 range is scaled by a power of two, so that its products stay exact. The inverse
// norm of a zero key is 0 and that of a non-finite key NaN, so that neither passes a comparison.
//
// last_similar searches. A block has 128 or 256 keys, its warps hold 16 or 32 each in registers, and panels of all keys
// pass by in shared memory (panels.cuh), from the end of the row on. A warp whose keys have all found one skips the
// rest, and the block ends when all warps have. Products are of the keys as stored (16-bit numbers on tensor cores,
// fp32 on CUDA cores), with fp32 sums. A lane looks at its products of a tile one by one only if the largest one is
// above the threshold. What key i spares is added to key last_i as an integer in units of 2^-32, so the order of the
// atomic additions does not matter. Hopper searches with a kernel of its own (sm90/key_similarity.cuh).
//
// similarity_scores combines the two sums. No result depends on the grid.
#pragma once
#include "../ops/key_similarity.h"
#include "last_similar.cuh"
#include "panels.cuh"
#include "rows.cuh"
#include "sm90/hopper.h"

namespace kvops {
namespace {

struct KeyCounts {  // of a head's valid keys
  unsigned not_finite, zero;
};

// The valid keys of all heads, packed, and what is known about each.
struct KeySimilarityMemory {
  int64_t rows;       // per head: n, padded to a multiple of kPackedRows
  int row_bytes;      // a multiple of 64
  char* keys;         // [b, Hk, rows]; zeros past the valid ones
  float* inverse;     // [b, Hk, rows]: 1/|k| of the packed key; see above
  Spared* spared;     // [b, Hk, rows]
  KeyCounts* counts;  // [b, Hk]

  KeySimilarityMemory(const KeySimilarityParams& p, Sections& sections)
      : rows((p.n + kPackedRows - 1) / kPackedRows * kPackedRows),
        row_bytes(PanelPlan::of(p.k.row_bytes).row_bytes),
        keys(sections.add<char>(p.b * p.heads * rows * row_bytes)),
        inverse(sections.add<float>(p.b * p.heads * rows)),
        spared(sections.add<Spared>(p.b * p.heads * rows)),
        counts(sections.add<KeyCounts>(p.b * p.heads)) {}

  KVOPS_HOST_DEVICE KVView view() const { return {keys, 0, rows * row_bytes, row_bytes, row_bytes}; }
};

// One warp per packed row.
template <class T, bool kPaged>
__global__ void __launch_bounds__(256) pack_keys_kernel(KeySimilarityParams p, KeySimilarityMemory to) {
  using E = Value<T>;
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  if (row >= p.b * p.heads * to.rows) return;
  const int64_t head = row / to.rows, i = row % to.rows, b = head / p.heads;
  const int lane = threadIdx.x % 32, d = static_cast<int>(p.d);
  const bool there = i < p.slots.count(b);
  const T* const key =
      reinterpret_cast<const T*>(head_rows<kPaged, T>(p.k, b, head % p.heads).from(p.slots.first(b)).row(i, there));
  double squares = 0;
  bool finite = true;
  for (int c = lane; there && c < d; c += 32) {
    const float x = to_float(key[c]);
    finite = finite && is_finite(x);
    squares += static_cast<double>(x) * x;
  }
  finite = __all_sync(kWarp, finite);
  squares = lanes_sum<32>(squares);
  const double scale = !finite || squares == 0 || comfortable(static_cast<float>(squares)) ? 1.0
                       : squares < 1                                                       ? 0x1p100
                                                                                           : 0x1p-80;
  E* const packed = reinterpret_cast<E*>(to.keys + row * to.row_bytes);
  for (int c = lane; c < to.row_bytes / static_cast<int>(sizeof(E)); c += 32)
    packed[c] = from_float<E>(there && c < d ? static_cast<float>(to_float(key[c]) * scale) : 0.0f);
  if (lane != 0) return;
  to.inverse[row] = !finite ? CUDART_NAN_F : squares == 0 ? 0.0f : static_cast<float>(1 / (sqrt(squares) * scale));
  to.spared[row] = 0;
  if (!finite) atomicAdd(&to.counts[head].not_finite, 1u);
  if (there && squares == 0) atomicAdd(&to.counts[head].zero, 1u);
}

template <class E, int kPieces>
__global__ void __launch_bounds__(kPanelThreads, kPieces == 4 ? 2 : 1)
    last_similar_kernel(KeySimilarityParams p, KeySimilarityMemory packed, PanelPlan plan, unsigned blocks) {
  using Keys = KeyTile<E, kPieces>;
  constexpr int kOwn = Keys::kOwn, kBlocks = Keys::kBlocks, kAll = (1 << kOwn) - 1;
  DYNAMIC_SHARED(char, memory);
  const int64_t head = blockIdx.x / blocks;
  const int count = static_cast<int>(p.slots.count(head / p.heads));
  const int first = static_cast<int>(blockIdx.x % blocks) * kPanelWarps * Keys::kKeys;
  if (first >= count) return;
  const int lane = threadIdx.x % 32, key = first + static_cast<int>(threadIdx.x) / 32 * Keys::kKeys;
  const HeadRows own = packed.view().head(0, head).from(key);
  const float* const inverse = packed.inverse + head * packed.rows;
  const int left = count - key;

  Keys keys;
  keys.load(own, left, packed.row_bytes / 16, 0, true);
  LastSimilar similar[kOwn];
  int found = 0;  // bits: the keys that need no search any more, the same in the four lanes that share them
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int its = lane / 4 + 8 * i;
    similar[i] = {its < left ? inverse[key + its] : 0.0f};
    if (!similar[i].searches()) found |= 1 << i;
  }
  const int panels = (count + plan.rows - 1) / plan.rows, of_row = packed.row_bytes / 16;
  const auto load = [&](int i, char* panel) {
    const int from = (panels - 1 - i) * plan.rows;
    const char* const rows = packed.keys + (head * packed.rows + from) * packed.row_bytes;
    for (int x = threadIdx.x; x < plan.rows * of_row; x += kPanelThreads)
      copy_async(reinterpret_cast<uint4*>(panel + x / of_row * plan.pitch) + x % of_row, rows + int64_t{16} * x);
    if (static_cast<int>(threadIdx.x) < plan.rows / 4)
      copy_async(reinterpret_cast<uint4*>(panel + plan.rows * plan.pitch) + threadIdx.x,
                 inverse + from + 4 * threadIdx.x);
  };
  const auto search = [&](int i, const char* panel) {
    if (__all_sync(kWarp, found == kAll)) return false;
    const int from = (panels - 1 - i) * plan.rows;
    const float* const inverses = reinterpret_cast<const float*>(panel + plan.rows * plan.pitch) + lane % 4 * 2;
#pragma unroll 1
    for (int tile = plan.rows - kTileRows; tile >= 0; tile -= kTileRows) {
      Products<kBlocks> x;
      multiply_all<E, kPieces, kHoldsRows<E, kPieces>>(x, keys, packed.row_bytes, own, left, true,
                                                       panel + tile * plan.pitch, plan.pitch);
      // Calls fn(product, the other key, own key) with this lane's products, times the other keys' inverse norms.
      const auto for_products = [&](const auto& fn) {
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float its_inverse = inverses[tile + 8 * t + e];
#pragma unroll
            for (int own_key = 0; own_key < kOwn; ++own_key)
              fn(x[own_key / 2][t][own_key % 2 * 2 + e] * its_inverse, from + tile + 8 * t + lane % 4 * 2 + e, own_key);
          }
      };
      float largest[kOwn] = {};  // a threshold is at least 0; fmaxf() ignores NaN
      for_products([&](float product, int, int own_key) { largest[own_key] = fmaxf(largest[own_key], product); });
      bool maybe = false;
#pragma unroll
      for (int own_key = 0; own_key < kOwn; ++own_key) maybe |= similar[own_key].may_be(largest[own_key], p.threshold);
      if (maybe)
        for_products([&](float product, int other, int own_key) {
          similar[own_key].meet(product, other, key + lane / 4 + 8 * own_key, p.threshold);
        });
    }
#pragma unroll
    for (int own_key = 0; own_key < kOwn; ++own_key)
      if (!similar[own_key].searches()) found |= 1 << own_key;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) found |= __shfl_xor_sync(kWarp, found, step);
    return found != kAll;
  };
  for_panels(plan, memory, panels, load, search);
  spare_last(similar, packed.spared + head * packed.rows);
}

constexpr int kScoreTokens = 4;  // per thread

__global__ void __launch_bounds__(256)
    similarity_scores_kernel(KeySimilarityParams p, KeySimilarityMemory packed, unsigned blocks) {
  const int64_t head = blockIdx.x / blocks, b = head / p.heads;
  const int64_t count = p.slots.count(b);
  double squares = 0;  // every warp computes the anchor's length
  for (int c = threadIdx.x % 32; c < p.d; c += 32) {
    const double x = p.anchor[head * p.d + c];
    squares += x * x;
  }
  const double length = sqrt(lanes_sum<32>(squares));
  const KeyCounts counts = packed.counts[head];
  const int64_t finite = count - counts.not_finite;
  const bool alone = finite - counts.zero < 2;  // no pair of keys has a cosine but 0
  float* const scores = p.scores + head * p.n + p.slots.first(b);
  const int64_t first = int64_t{blockIdx.x % blocks} * 256 * kScoreTokens + threadIdx.x;
#pragma unroll 4
  for (int64_t i = first; i < min(first + 256 * kScoreTokens, count); i += 256) {
    const int64_t row = head * packed.rows + i;
    const double itself = packed.inverse[row] != 0.0f, spared = static_cast<double>(packed.spared[row]) * 0x1p-32;
    const double others = alone ? scores[i] - scores[i] : -scores[i] * length - itself - spared;  // NaN stays NaN
    scores[i] = static_cast<float>(others / static_cast<double>(finite));
  }
}

inline int64_t key_similarity_workspace(const KeySimilarityParams& p) {
  return bytes_of<KeySimilarityMemory>(p);
}

inline void key_similarity_cuda(const KeySimilarityParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  if (heads * p.n == 0) return;
  Sections sections{workspace};
  const KeySimilarityMemory packed(p, sections);
  zero_async(packed.counts, heads * sizeof(KeyCounts), stream);
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    using E = Value<T>;
    with_pages<T>(p.k, [&](auto paged) {
      launch<pack_keys_kernel<T, paged>>(grid_of((heads * packed.rows + 7) / 8), 256, 0, stream, p, packed);
    });
    if (p.threshold >= 1) return;
    if (sm90::last_similar(p, packed.view(), sizeof(T) == 1 ? DType::bf16 : p.dtype, packed.rows, packed.inverse,
                           packed.spared, stream))
      return;
    const PanelPlan plan = PanelPlan::of(p.k.row_bytes, sizeof(float));
    const auto blocks_of = [&](int keys) { return (p.n + keys - 1) / keys; };
    // Blocks of 256 keys that leave multiprocessors idle are halved: with room for wider rows, warps hold 16 keys.
    const bool halved = heads * blocks_of(256) < multiprocessors();
    with_pieces<E>(halved ? 512 : packed.row_bytes, [&](auto pieces) {
      constexpr int kPieces = decltype(pieces)::value, kKeys = kPanelWarps * KeyTile<E, kPieces>::kKeys;
      const int64_t blocks = blocks_of(kKeys);
      launch<last_similar_kernel<E, kPieces>>(grid_of(heads * blocks), kPanelThreads,
                                              static_cast<size_t>(plan.stages) * plan.bytes, stream, p, packed, plan,
                                              static_cast<unsigned>(blocks));
    });
  });
  constexpr int64_t kTokens = 256 * kScoreTokens;
  const int64_t blocks = (p.n + kTokens - 1) / kTokens;
  launch<similarity_scores_kernel>(grid_of(heads * blocks), 256, 0, stream, p, packed, static_cast<unsigned>(blocks));
}

}  // namespace
}  // namespace kvops
