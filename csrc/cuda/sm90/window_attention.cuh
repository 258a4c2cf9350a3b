// Partial sums of attention for Hopper. For each row and each split of the keys, window_attention, and with K alone the
// first half of window_scores, need
//
//   m = max of its logits,  l = sum of exp(logit - m),  o = sum of exp(logit - m) v_j     (o with V only)
//
// which the portable version's combine kernel adds up in the order of the splits.
//
// Bytes that must move: K once and V once; m, l, o are 4 (dv + 2) bytes per row and split. A work item is two tiles of
// 64 rows with one split of the keys: one tile for each of the two consumer warpgroups, which share the stages of one
// ring. If there is only one tile, an item is that tile with two splits, and each split gets one warpgroup and half of
// the stages. The grid has one block per multiprocessor; block x takes items x, x + grid, ... Runs of rows are the
// fastest index of an item, so those of one split run at the same time and find its keys in L2.
//
// The schedule of a block, in the manner of FlashAttention-3:
//
//   warp 8        K0 V0 K1 V1 K2 V2 ...  copied into the ring by the copy engine, continuing with the next item
//   warps 9, 10   the next item's queries, as soon as the last product with these is done; one warp per warpgroup
//   warpgroup 0   K0 | weights 0 | K1 V0 ........... | K2 V1 ............. |       products that are started
//                                  |      weights 1 |       weights 2      |       what goes on meanwhile
//   warpgroup 1        K0 | weights 0 | K1 V0 ............ | ...                   the same, half a step later
//
// So the tensor cores have the product with the next keys queued before the one with the last values is done, and a
// warpgroup's exponentials overlap with its own product with V and with the other warpgroup's products. The two take
// turns to start products, so that they do not do the same thing at the same time. A stage is released when the product
// that reads it is done. The accumulators of the logits have the layout of wgmma's left operand, so weights stay in
// registers.
//
// For an H200 (calculated), a tile of 64 rows and 128 keys with d = 128 takes 1024 cycles of
// the tensor cores, 512 of the exponential units, and 444 instructions per warp, with one warp on each of four
// schedulers. One row per query head (decoding) is padded to a tile of 64. A multiprocessor's share of the memory
// bandwidth delivers a block of 128 keys and values in about 3300 cycles, so even then the tensor cores are idle two
// thirds of the time.
//
// The maximum of a row reveals a logit that is NaN or +inf (-inf has weight 0 anyway). A warp that finds one, and every
// warp in a block of keys that some row does not see entirely, checks all its logits and masks out those that do not
// belong.
//
// Not yet run on a GPU.
#pragma once
#include "../../ops/window_attention.h"
#include "tile.cuh"

namespace kvops::sm90 {
namespace {

constexpr int kPassThreads = kConsumers + 128;         // registers are assigned to whole warpgroups
constexpr int kPassRegisters = 216, kHelpersGet = 72;  // per consumer, per other thread: 256 a + 128 b <= 65536
constexpr int kCopyWarp = 0, kQueryWarp = 1;           // after the consumers' warps; one query warp per warpgroup

template <int kDim>
constexpr int kPassKeys = kDim > 128 ? 64 : 128;  // per block of keys; a stage holds these or their values

// Offsets in shared memory. The queries, [kGroups, kRows, d], come first.
struct PassShared {
  int stages, full, empty, loaded, free, landed, bytes;

  KVOPS_HOST_DEVICE PassShared(int count, int keys, int d)
      : stages(kGroups * kRows * d * 2),
        full(stages + count * keys * d * 2),
        empty(full + count * 8),
        loaded(empty + count * 8),  // queries
        free(loaded + kGroups * 8),
        landed(free + kGroups * 8),
        bytes(landed + 8) {}
};

// How the rows and the keys of each head are divided, and the outputs.
struct PassPlan {
  int tiles;   // of kRows rows
  int splits;  // of the keys: split s starts at the first valid slot + s * split_keys
  int64_t split_keys;
  int stages;
  bool wide;      // queries are read in whole pieces
  float2* sums;   // [b * heads, splits, rows]: the largest logit, times log2(e), and the sum of 2^(logit - that)
  float* out;     // with V, sums are [b * heads, rows, splits], and out [.., dv] is the sum of 2^(logit - that) v
  float* logits;  // [b * heads, rows, n], or null: times log2(e), for the keys that a row sees

  // Whether the warpgroups divide an item by tiles (and share its split), rather than by splits.
  KVOPS_HOST_DEVICE bool shared() const { return tiles > 1; }
  KVOPS_HOST_DEVICE int row_blocks() const { return (tiles + 1) / 2; }
  KVOPS_HOST_DEVICE int split_blocks() const { return shared() ? splits : (splits + 1) / 2; }
  KVOPS_HOST_DEVICE int64_t items(const Window& p) const { return p.b * p.heads * split_blocks() * row_blocks(); }
};

// A block's path through its items. Each warp keeps its own copy.
struct Walk {
  const Window& p;
  const PassPlan& plan;
  int item, unit, batch, head, row_block, split_block;  // unit: a KV head of a batch row
  Seen seen;

  __device__ Walk(const Window& p, const PassPlan& plan) : p(p), plan(plan), item(blockIdx.x), seen(p, place()) {}

  // Advances. Returns false past the last item.
  __device__ bool next() {
    item += gridDim.x;
    if (item >= plan.items(p)) return false;
    const int before = batch;
    if (place() != before) seen = Seen(p, batch);
    return true;
  }

  // The work of a consumer warpgroup: a tile of rows, and those keys of a split that some row sees, from `first` on.
  struct Share {
    int tile, split, first, count;
  };
  __device__ Share share(int group) const {
    Share x;
    x.tile = row_block * 2 + (plan.shared() ? group : 0);
    x.split = plan.shared() ? split_block : split_block * kGroups + group;
    x.first = static_cast<int>(min(seen.first + x.split * plan.split_keys, p.n));
    const int64_t last = min(x.first + plan.split_keys, static_cast<int64_t>(seen.last));
    x.count = x.split < plan.splits ? static_cast<int>(max(last - x.first, static_cast<int64_t>(0))) : 0;
    return x;
  }
  __device__ QueryRows rows() const { return {batch, head * p.group, p.group}; }

 private:
  __device__ int place() {
    const int heads = static_cast<int>(p.heads), rest = item / plan.row_blocks();
    row_block = item % plan.row_blocks();
    split_block = rest % plan.split_blocks();
    unit = rest / plan.split_blocks();
    head = unit % heads;
    return batch = unit / heads;
  }
};

// The running state of a thread's two rows.
struct RowPair {
  int limit[2];  // relative to the split's first key
  float most[2] = {-HUGE_VALF, -HUGE_VALF}, sum[2] = {};

  // Turns the products with the keys from `key` on into weights: 2^(scale x - scale most). Earlier sums must be
  // multiplied by `rescale`.
  template <int kKeys>
  __device__ void weigh(float (&x)[kKeys / 2], float (&rescale)[2], float scale, int key, bool all_seen) {
    const int thread = threadIdx.x % 128;
    float top[2];
    for (bool careful = !all_seen;; careful = true) {
      if (careful) {
#pragma unroll
        for (int j = 0; j < kKeys / 2; ++j) {
          const bool seen = key + Accumulator::column(thread, j) < limit[j / 2 % 2],
                     finite = fabsf(x[j]) < CUDART_INF_F;
          x[j] = seen & finite ? x[j] : -CUDART_INF_F;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float chains[2] = {most[r], -CUDART_INF_F};
#pragma unroll
        for (int j = 0; j < kKeys / 2; ++j)
          if (j / 2 % 2 == r) chains[j % 2] = max_nan(chains[j % 2], x[j]);
        top[r] = max_nan(chains[0], chains[1]);
        top[r] = max_nan(top[r], __shfl_xor_sync(kWarp, top[r], 1));
        top[r] = max_nan(top[r], __shfl_xor_sync(kWarp, top[r], 2));
      }
      if (!__any_sync(kWarp, !(max_nan(top[0], top[1]) < CUDART_INF_F))) break;
    }
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = top[r] == -CUDART_INF_F ? 0.0f : top[r] * scale;
      rescale[r] = exp2_fast(fmaf(most[r], scale, -base[r]));
    }
    // Large logits (kLargeLogit) have their maximum subtracted before scaling.
    if (__any_sync(kWarp, fmaxf(fabsf(base[0]), fabsf(base[1])) >= kLargeLogit)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (fabsf(base[r]) < kLargeLogit) continue;
#pragma unroll
        for (int j = 0; j < kKeys / 2; ++j)
          if (j / 2 % 2 == r) x[j] -= top[r];
        rescale[r] = exp2_fast((most[r] - top[r]) * scale);
        base[r] = 0.0f;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = top[r];
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      x[j] = exp2_fast(fmaf(x[j], scale, -base[j / 2 % 2]));
      sum[j / 2 % 2] += x[j];
    }
  }
};

// A block, from the view of each of its threads.
template <class T, int kDim, bool kValues>
struct PassBlock {
  static constexpr int kKeys = kPassKeys<kDim>, kStage = kKeys * kDim, kTile = kRows * kDim;  // elements
  const Window& p;
  const PassPlan& plan;
  T *queries, *stages;
  Ring ring;  // over all stages
  Ring rows;  // of the queries: one stage per warpgroup
  uint64_t* landed;

  __device__ PassBlock(const Window& p, const PassPlan& plan, unsigned char* shared) : p(p), plan(plan) {
    const PassShared at(plan.stages, kKeys, kDim);
    const auto barriers = [&](int offset) { return reinterpret_cast<uint64_t*>(shared + offset); };
    queries = reinterpret_cast<T*>(shared);
    stages = reinterpret_cast<T*>(shared + at.stages);
    ring = {barriers(at.full), barriers(at.empty), plan.stages};
    rows = {barriers(at.loaded), barriers(at.free), kGroups};
    landed = barriers(at.landed);
  }

  // Called by one thread.
  __device__ void init() const {
    ring.init(plan.shared() ? 8 : 4);
    rows.init(4);
    barrier_init(landed, 1);
    barriers_made();
  }

  // A warpgroup's stages: all of them, or its half.
  __device__ Ring ring_of(int group) const {
    if (plan.shared()) return ring;
    const int own = plan.stages / kGroups;
    return {ring.full + group * own, ring.empty + group * own, own};
  }
  __device__ Ring rows_of(int group) const { return {rows.full + group, rows.empty + group, 1}; }
  __device__ T* stage_of(const Ring& x) const { return stages + (x.full - ring.full + x.stage) * kStage; }

  // The producer: copies K and V of all items. Runs in one warp, whose first lane starts the copies.
  __device__ void copy_items(const TensorMap& keys, const TensorMap& values) const {
    const int lane = threadIdx.x % 32;
    Ring rings[kGroups] = {ring_of(0), ring_of(1)};
    unsigned phase = 0;  // of `landed`
    Walk walk(p, plan);
    do {
      const Walk::Share shares[kGroups] = {walk.share(0), walk.share(1)};
      const int others = plan.shared() ? 0 : shares[1].count;
      for (int key = 0; key < max(shares[0].count, others); key += kKeys) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          Ring& to = rings[group];
          const int at = shares[group].first + key, left = (group == 0 ? shares[0].count : others) - key;
          if (left <= 0) continue;
          if (lane == 0) copy_keys<T, kDim, kKeys>(keys, to.fill(kStage * 2), stage_of(to), at, walk.head, walk.batch);
          to.advance(1);
          if constexpr (kValues) {
            T* const v = stage_of(to);
            if (left >= kKeys) {
              if (lane == 0) copy_keys<T, kDim, kKeys>(values, to.fill(kStage * 2), v, at, walk.head, walk.batch);
            } else {
              // After them come values of other splits, or ones that no row sees, and 0 * NaN would be NaN. So the
              // consumers get the stage only after these have been set to 0.
              if (lane == 0) {
                to.wait_empty();
                barrier_announce(landed, kStage * 2);
                copy_keys<T, kDim, kKeys>(values, landed, v, at, walk.head, walk.batch);
              }
              barrier_wait(landed, phase);
              phase ^= 1;
              constexpr int kPieces = kDim / 8;  // per row
              for (int j = left * kPieces + lane; j < kKeys * kPieces; j += 32)
                *reinterpret_cast<uint4*>(v + slab_at(j / kPieces, j % kPieces * 8, kKeys)) = uint4{};
              fence_stores();
              __syncwarp();
              if (lane == 0) barrier_arrive(to.full + to.stage);
            }
            to.advance(1);
          }
        }
      }
    } while (walk.next());
  }

  // Loads the queries of one warpgroup, by one warp.
  __device__ void load_items(int group) const {
    Ring to = rows_of(group);
    Walk walk(p, plan);
    do {
      const Walk::Share share = walk.share(group);
      if (share.count == 0) continue;
      to.wait_empty();
      load_queries<T, kDim>(p, walk.rows(), share.tile, 0, kRows, queries + group * kTile, plan.wide);
      fence_stores();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(to.full);
      to.advance(1);
    } while (walk.next());
  }

  // The work of a consumer warpgroup.
  __device__ void attend_items(int group) const {
    const int thread = threadIdx.x % 128;
    const float scale = p.scale * kLog2e;
    const T* const q = queries + group * kTile;
    const Turns turns(plan.shared(), group);  // groups with splits of their own may have different numbers of keys
    Ring from = ring_of(group), own_rows = rows_of(group);
    Walk walk(p, plan);
    do {
      const auto [tile, split, first, count] = walk.share(group);
      const int row = tile * kRows + Accumulator::row(thread, 0), rows = walk.rows().count(p);  // the other is row + 8
      RowPair pair;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        pair.limit[r] =
            row + 8 * r < rows
                ? min(static_cast<int>(p.limit(walk.batch, (row + 8 * r) % static_cast<int>(p.w))) - first, count)
                : 0;
      const int all_seen = min(walk.seen.all - first, count);
      const auto weigh = [&](float (&x)[kKeys / 2], float (&rescale)[2], int key) {
        if constexpr (kValues) {
          if (plan.logits) write_logits(x, walk.unit * rows + row, first + key, pair, key);
        }
        pair.template weigh<kKeys>(x, rescale, scale, key, key + kKeys <= all_seen);
      };

      float o[kValues ? kDim / 2 : 1] = {};
      if (count > 0) {
        float x[kKeys / 2], rescale[2];
        own_rows.wait();
        if constexpr (kValues) {
          Weights<T, kKeys> weights;
          const auto begin_next_keys = [&](const Ring& at) {
            at.wait();
            turns.take();
            begin_keys<T, kDim, kKeys>(x, q, stage_of(at));
          };
          begin_next_keys(from);
          turns.pass();
          wait_products<0>(x);
          from.release();
          from.advance(1);
          weigh(x, rescale, 0);
          for (int key = kKeys;; key += kKeys) {  // from: the values of the weights in x
            // Wait here and not after weigh(): within a basic block the compiler moves the wait before the
            // exponentials.
            wait_products<0>(o);
            if (key > kKeys) {
              from.release();
              from.advance(2);
            }
            if (__any_sync(kWarp, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
              for (int j = 0; j < kDim / 2; ++j) o[j] *= rescale[j / 2 % 2];
            }
            weights.round(x);
            if (key >= count) break;
            Ring next = from;
            next.advance(1);
            begin_next_keys(next);
            from.wait();
            begin_values<T, kDim, kKeys>(o, weights, stage_of(from));
            turns.pass();
            wait_products<1>(x);
            next.release();
            weigh(x, rescale, key);
          }
          own_rows.release();
          from.wait();
          begin_values<T, kDim, kKeys>(o, weights, stage_of(from));
          wait_products<0>(o);
          from.release();
          from.advance(1);
        } else {
          for (int key = 0; key < count; key += kKeys, from.advance(1)) {
            from.wait();
            turns.take();
            begin_keys<T, kDim, kKeys>(x, q, stage_of(from));
            turns.pass();
            wait_products<0>(x);
            from.release();
            weigh(x, rescale, key);
          }
          own_rows.release();
        }
        own_rows.advance(1);
      }

#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = pair.sum[r];
        sum += __shfl_xor_sync(kWarp, sum, 1);
        sum += __shfl_xor_sync(kWarp, sum, 2);
        if (row + 8 * r >= rows || split >= plan.splits) continue;
        const bool counts = pair.limit[r] > 0;  // the others have added up weights of a zero query
        const int64_t unit = walk.unit, its = row + 8 * r;
        const int64_t to =
            kValues ? (unit * rows + its) * plan.splits + split : (unit * plan.splits + split) * rows + its;
        if (thread % 4 == 0)
          plan.sums[to] = counts ? make_float2(pair.most[r] * scale, sum) : make_float2(-CUDART_INF_F, 0);
        if constexpr (kValues) {
          float* const out = plan.out + to * kDim;
#pragma unroll
          for (int j = 0; j < kDim / 2; j += 4)
            *reinterpret_cast<float2*>(out + Accumulator::column(thread, j)) =
                counts ? make_float2(o[j + 2 * r], o[j + 2 * r + 1]) : float2{};
        }
      }
    } while (walk.next());
  }

  // Writes the logits of the thread's two rows, the first of which is `row`, with the keys from slot `slot` on.
  __device__ void write_logits(const float (&x)[kKeys / 2], int64_t row, int slot, const RowPair& pair, int key) const {
    const int thread = threadIdx.x % 128;
    const float scale = p.scale * kLog2e;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int seen = pair.limit[r] - key;
      if (seen <= 0) continue;
      float* const to = plan.logits + (row + 8 * r) * p.n + slot;
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j)
        if (j / 2 % 2 == r && Accumulator::column(thread, j) < seen) to[Accumulator::column(thread, j)] = x[j] * scale;
    }
  }
};

template <class T, int kDim, bool kValues>
__global__ void __launch_bounds__(kPassThreads, 1)
    window_pass_sm90_kernel(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
                            const __grid_constant__ Window p, const __grid_constant__ PassPlan plan) {
  const PassBlock<T, kDim, kValues> block(p, plan, aligned_shared());
  if (threadIdx.x == 0) block.init();
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    give_registers<kHelpersGet>();
    const int warp = (threadIdx.x - kConsumers) / 32;
    if (warp == kCopyWarp)
      block.copy_items(keys, values);
    else if (warp < kQueryWarp + kGroups)
      block.load_items(warp - kQueryWarp);
  } else {
    take_registers<kPassRegisters>();
    block.attend_items(__shfl_sync(kWarp, threadIdx.x / 128, 0));  // tells the compiler that it is uniform in the warp
  }
}

// Returns false, without doing anything, if it does not support the call. v: [b, heads, n, dv]; null for the sums
// alone.
inline bool window_pass_hopper(const Window& p, const KVView* v, int64_t splits, int64_t split_keys, float2* sums,
                               float* out, float* logits, cudaStream_t stream) {
  if (!serves(p) || (v ? v->row_bytes != p.k.row_bytes || p.d > 128 : p.w == 1)) return false;
  PassPlan plan{.tiles = static_cast<int>((p.group * p.w + kRows - 1) / kRows),
                .splits = static_cast<int>(splits),
                .split_keys = split_keys,
                .stages = 12,  // even, for two rings
                .wide = wide_queries(p),
                .sums = sums,
                .out = out,
                .logits = logits};
  const int64_t items = plan.items(p), blocks = multiprocessors();
  if (items > 0x3fffffff) return false;
  bool served = false;
  const auto run = [&](auto element, auto dim, auto with_values) {
    using T = decltype(element);
    constexpr int kDim = decltype(dim)::value, kKeys = kPassKeys<kDim>;
    while (PassShared(plan.stages, kKeys, kDim).bytes > kSharedBytes) plan.stages -= 2;
    TensorMap keys, values;
    if (!tensor_map<T>(keys, p.k, p.b, p.heads, p.n, kKeys)) return;
    if (!tensor_map<T>(values, v ? *v : p.k, p.b, p.heads, p.n, kKeys)) return;
    launch<window_pass_sm90_kernel<T, kDim, decltype(with_values)::value>>(
        grid_of(items < blocks ? items : blocks), kPassThreads, PassShared(plan.stages, kKeys, kDim).bytes + 1024,
        stream, keys, values, p, plan);
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
