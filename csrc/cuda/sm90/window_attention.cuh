// The first half of window_scores and window_attention for Hopper: of each row and each split of the keys,
//
//   m = max of its logits,  l = sum of exp(logit - m),  o = sum of exp(logit - m) v_j     (o with V only)
//
// which the combine kernel of the portable version adds up, in the order of the splits.
//
// Bytes that must move: K once, and V once; m, l, o are 4 (dv + 2) bytes for each row and split. A block of threads has
// 128 rows (two tiles, one for each consumer warpgroup, which share the keys in the ring) and one split; of at most 64
// rows it has one tile and two splits (a warpgroup and half of the ring for each). Blocks for more rows of the same
// split follow one another, so that they find its keys in L2.
//
// As in FlashAttention-3 the weights stay in registers: a wgmma's accumulators lie as another takes its left operand.
// One warpgroup multiplies while the other has its exponentials. A logit that is not finite is found as x * 0 is NaN
// then; the thread that finds it, and every thread in a block of keys that some row does not see whole, goes over its
// logits once more and takes out what does not belong.
//
// Not yet run on a GPU.
#pragma once
#include "../../ops/window_attention.h"
#include "tile.cuh"

namespace kvops::sm90 {
namespace {

template <int kDim, bool kValues>
constexpr int kPassKeys = kValues || kDim > 128 ? 64 : 128;  // of a block

// Offsets in shared memory.
struct PassShared {
  int stages, full, empty, bytes;  // Q, [tiles, kRows, d], comes first

  KVOPS_HOST_DEVICE PassShared(int tiles, int count, int stage_bytes, int d)
      : stages(tiles * kRows * d * 2),
        full(stages + count * stage_bytes),
        empty(full + count * 8),
        bytes(empty + count * 8) {}
};

// How the rows and the keys of each head are cut, and what comes of them.
struct PassPlan {
  int tiles;   // of kRows rows
  int splits;  // of the keys: split s begins at the first valid slot + s * split_keys
  int64_t split_keys;
  float2* sums;  // [b * heads, splits, rows]: the largest logit, times log2(e), and the sum of 2^(logit - it)
  float* out;    // with V sums are [b * heads, rows, splits], and this is too, [.., dv]: the sum of 2^(logit - it) v

  // By two tiles or by two splits.
  KVOPS_HOST_DEVICE bool shared() const { return tiles > 1; }
  KVOPS_HOST_DEVICE int row_blocks() const { return (tiles + 1) / 2; }
  KVOPS_HOST_DEVICE int split_blocks() const { return shared() ? splits : (splits + 1) / 2; }
};

template <class T, int kDim, bool kValues>
__global__ void __launch_bounds__(kThreads, 1)
    window_pass_sm90_kernel(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
                            const Window p, const PassPlan plan, int stages, bool wide) {
  constexpr int kKeys = kPassKeys<kDim, kValues>, kStage = kKeys * kDim * (kValues ? 2 : 1);  // elements
  unsigned char* const shared = aligned_shared();
  const int tiles = plan.shared() ? 2 : 1;  // here
  const PassShared at(tiles, stages, kStage * 2, kDim);
  T* const q = reinterpret_cast<T*>(shared);
  T* const stage = reinterpret_cast<T*>(shared + at.stages);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + at.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(shared + at.empty);

  const int row_block = blockIdx.x % plan.row_blocks();
  const int split_block = static_cast<int>(blockIdx.x / plan.row_blocks() % plan.split_blocks());
  const int64_t unit = blockIdx.x / plan.row_blocks() / plan.split_blocks();  // a KV head
  const QueryRows rows{unit / p.heads, unit % p.heads * p.group, p.group};
  const int head = static_cast<int>(unit % p.heads), batch = static_cast<int>(rows.batch);
  const Seen seen(p, rows.batch);

  // Each group's ring and split. Of a split, what some row sees: count keys from `first` on.
  const int own = plan.shared() ? stages : stages / kGroups;
  const auto ring_of = [&](int group) {
    const int before = plan.shared() ? 0 : group * own;
    return Ring{full + before, empty + before, own};
  };
  const auto split_of = [&](int group) { return plan.shared() ? split_block : split_block * kGroups + group; };
  const auto first_of = [&](int split) { return static_cast<int>(min(seen.first + split * plan.split_keys, p.n)); };
  const auto count_of = [&](int split) {
    const int64_t last = min(first_of(split) + plan.split_keys, static_cast<int64_t>(seen.last));
    return split < plan.splits ? static_cast<int>(max(last - first_of(split), static_cast<int64_t>(0))) : 0;
  };

  if (threadIdx.x == 0) {
    for (int group = 0; group < (plan.shared() ? 1 : kGroups); ++group) ring_of(group).init(plan.shared() ? 8 : 4);
    barriers_made();
  }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {  // the producer
    if (threadIdx.x == kConsumers) {
      Ring rings[kGroups] = {ring_of(0), ring_of(1)};
      const int first[kGroups] = {first_of(split_of(0)), first_of(split_of(1))};
      const int count[kGroups] = {count_of(split_of(0)), plan.shared() ? 0 : count_of(split_of(1))};
      for (int key = 0; key < max(count[0], count[1]); key += kKeys) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (key >= count[group]) continue;
          Ring& ring = rings[group];
          T* const to = stage + (ring.full - full + ring.stage) * kStage;
          uint64_t* const barrier = ring.fill(kStage * 2);
          copy_keys<T, kDim, kKeys>(keys, barrier, to, first[group] + key, head, batch);
          if constexpr (kValues)
            copy_keys<T, kDim, kKeys>(values, barrier, to + kKeys * kDim, first[group] + key, head, batch);
          ring.advance(1);
        }
      }
    }
    return;
  }

  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  for (int tile = 0; tile < tiles; ++tile) load_queries(p, rows, row_block * 2 + tile, q + tile * kRows * kDim, wide);
  share_stores(kConsumers, kAllConsumers);

  Ring ring = ring_of(group);
  T* const own_stages = stage + (ring.full - full) * kStage;
  const int split = split_of(group), first = first_of(split), count = count_of(split);
  const int tile = plan.shared() ? group : 0;
  const int row = (row_block * 2 + tile) * kRows + Accumulator::row(thread, 0);  // and 8 below
  int limit[2];                                                                  // from `first` on
#pragma unroll
  for (int r = 0; r < 2; ++r)
    limit[r] = row + 8 * r < rows.count(p)
                   ? min(static_cast<int>(p.limit(rows.batch, (row + 8 * r) % p.w)) - first, count)
                   : 0;
  const int all_seen = min(seen.all - first, count);

  float o[kValues ? kDim / 2 : 1] = {};
  float most[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {};
  const float scale = p.scale * kLog2e;

  for (int key = 0; key < count; key += kKeys, ring.advance(1)) {
    T* const k = own_stages + ring.stage * kStage;
    ring.wait();
    if constexpr (kValues) {
      if (key + kKeys > count) {           // values of other splits, or that no row sees: 0 * NaN would be NaN
        constexpr int kPieces = kDim / 8;  // of a row
        const int writer = plan.shared() ? threadIdx.x : thread, writers = plan.shared() ? kConsumers : 128;
        for (int j = (count - key) * kPieces + writer; j < kKeys * kPieces; j += writers)
          *reinterpret_cast<uint4*>(k + kKeys * kDim + slab_at(j / kPieces, j % kPieces * 8, kKeys)) = uint4{};
        if (plan.shared())
          share_stores(kConsumers, kAllConsumers);
        else
          share_stores(128, kOwnGroup + group);
      }
    }
    float x[kKeys / 2];
    multiply_keys<T, kDim, kKeys>(x, q + tile * kRows * kDim, k);
    if constexpr (!kValues) ring.release();

    float poison = 0;
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) poison = fmaf(x[j], 0.0f, poison);
    if (key + kKeys > all_seen || poison != 0.0f) {
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) {
        const bool usable = key + Accumulator::column(thread, j) < limit[j / 2 % 2] && fabsf(x[j]) < CUDART_INF_F;
        x[j] = usable ? x[j] : -CUDART_INF_F;
      }
    }
    float base[2], rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float next = most[r];
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j)
        if (j / 2 % 2 == r) next = fmaxf(next, x[j]);
      next = fmaxf(next, __shfl_xor_sync(kWarp, next, 1));
      next = fmaxf(next, __shfl_xor_sync(kWarp, next, 2));
      base[r] = next == -CUDART_INF_F ? 0.0f : next * scale;
      rescale[r] = exp2_fast(fmaf(most[r], scale, -base[r]));
      most[r] = next;
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      x[j] = exp2_fast(fmaf(x[j], scale, -base[j / 2 % 2]));
      sum[j / 2 % 2] += x[j];
    }
    if constexpr (kValues) {
#pragma unroll
      for (int j = 0; j < kDim / 2; ++j) o[j] *= rescale[j / 2 % 2];
      add_values<T, kDim, kKeys>(o, x, k + kKeys * kDim);
      ring.release();
    }
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 1);
    sum[r] += __shfl_xor_sync(kWarp, sum[r], 2);
    if (row + 8 * r >= rows.count(p) || split >= plan.splits) continue;
    const bool counts = limit[r] > 0;  // others have added up weights of a zero query
    const int64_t count = rows.count(p), its = row + 8 * r;
    const int64_t to =
        kValues ? (unit * count + its) * plan.splits + split : (unit * plan.splits + split) * count + its;
    if (thread % 4 == 0) plan.sums[to] = counts ? make_float2(most[r] * scale, sum[r]) : make_float2(-CUDART_INF_F, 0);
    if constexpr (kValues) {
      float* const out = plan.out + to * kDim;
#pragma unroll
      for (int j = 0; j < kDim / 2; j += 4)
        *reinterpret_cast<float2*>(out + Accumulator::column(thread, j)) =
            counts ? make_float2(o[j + 2 * r], o[j + 2 * r + 1]) : float2{};
    }
  }
}

// False if it does not serve these. v: [b, heads, n, dv], or null for the sums alone.
inline bool window_pass_hopper(const Window& p, const KVView* v, int64_t splits, int64_t split_keys, float2* sums,
                               float* out, cudaStream_t stream) {
  if (!serves(p) || (v && (v->row_bytes != p.k.row_bytes || p.d > 128))) return false;
  PassPlan plan{static_cast<int>((p.group * p.w + kRows - 1) / kRows), static_cast<int>(splits), split_keys, sums, out};
  const int64_t grid = p.b * p.heads * plan.split_blocks() * plan.row_blocks();
  bool served = false;
  const auto run = [&](auto element, auto dim, auto with_values) {
    using T = decltype(element);
    constexpr bool kValues = decltype(with_values)::value;
    constexpr int kDim = decltype(dim)::value, kKeys = kPassKeys<kDim, kValues>;
    const auto shared = [&](int stages) {
      return PassShared(plan.shared() ? 2 : 1, stages, kKeys * kDim * (kValues ? 4 : 2), kDim).bytes;
    };
    int stages = 6;  // even, for two rings
    while (shared(stages) > kSharedBytes) stages -= 2;
    TensorMap keys, values;
    if (!tensor_map<T>(keys, p.k, p.b, p.heads, p.n, kKeys)) return;
    if (!tensor_map<T>(values, v ? *v : p.k, p.b, p.heads, p.n, kKeys)) return;
    launch<window_pass_sm90_kernel<T, kDim, kValues>>(grid_of(grid), kThreads, shared(stages) + 1024, stream, keys,
                                                      values, p, plan, stages, wide_queries(p));
    served = true;
  };
  with_element(p.dtype, [&](auto element) {
    with_head_dim(p.d, [&](auto dim) {
      if (!v)
        run(element, dim, std::false_type{});
      else if constexpr (decltype(dim)::value <= 128)
        run(element, dim, std::true_type{});
    });
  });
  return served;
}

}  // namespace
}  // namespace kvops::sm90
