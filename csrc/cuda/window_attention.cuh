// The attention of a window's rows, or of one decode step: parts of it for runs of keys, and their combination. The
// scores come from window_scores' passes, with the lse that is made here.
//
//   out[i] = sum over j of exp(logit[i, j] - lse[i]) v_j,   lse[i] = log(sum over j of exp(logit[i, j]))
//
// Bytes that must move: K and V once, and K once more for the scores (w > 1), or the logits of one row for each query
// head, written and read: 8 G bytes for each key.
//
// attention_parts (16-bit numbers, head dims up to 256): FlashAttention-2, split over the keys. K and V come by
// cp.async into a ring of stages in shared memory. A block's warps share the rows, 16 each; with fewer rows than warps
// they share the keys of each stage too, so that decoding keeps all warps busy. Each warp is by itself: its rows'
// maximum, sum and out are in its registers, and what it has at the end is one part of `parts` of each row. So nothing
// is merged within a block, and no result depends on the order in which warps run. Scores of 16 or 32 keys at a time
// are turned to weights in the registers in which the tensor cores left them, and go back as the left side of the
// product with V, which ldmatrix transposes. Queries and keys are read from shared memory as in window.cuh, 16 bytes a
// lane.
//
// attention_combine: a block for each row adds its parts in their order.
//
// plain_attention_parts (fp32, wider heads): with the lse of window_scores' first pass the weights are final at once,
// and need no running maximum. 8 warps make the weights of 128 keys for 16 rows, then every thread adds up four
// channels of some of the keys. CUDA cores, K three times, K and V anew for every 16 rows (from L2): right, not fast.
//
// Grid: x runs over (batch, KV head, split), y over runs of rows. Splits depend on the number of keys and rows and on
// the GPU, not on the heads or the batch. Not yet measured on a GPU.
#pragma once
#include "../ops/window_attention.h"
#include "async.cuh"
#include "sm90/hopper.h"
#include "window.cuh"

namespace kvops {
namespace {

constexpr int64_t kTensorCoreDim = 256;
constexpr int kPlainKeys = 16 * kWindowWarps;  // of a step of the plain kernel

// How a call is cut.
struct AttentionPlan {
  bool tensor_cores;
  int warps, row_warps, key_warps;  // of a block: row_warps of 16 rows each, times key_warps that share the keys
  int tile_keys, stages;
  int pitch, value_pitch;                // bytes from row to row in shared memory, of queries and keys, and of values
  bool wide, wide_values, wide_queries;  // 16-byte aligned rows
  int row_blocks;
  Splits splits;
  int parts;  // of each row
  int64_t shared_bytes;

  static AttentionPlan of(const WindowAttentionParams& p) {
    const Window& w = p.window;
    AttentionPlan x = {};
    x.tensor_cores = w.dtype != DType::f32 && w.d <= kTensorCoreDim && p.dv <= kTensorCoreDim;
    x.pitch = query_pitch(w);
    x.value_pitch = static_cast<int>(((p.v.row_bytes + 31) / 32 * 2 | 1) * 16);
    x.wide = aligned_rows(w.k, w.b, w.heads, w.n);
    x.wide_values = aligned_rows(p.v, w.b, w.heads, w.n);
    x.wide_queries = aligned_queries(w);
    const int rows = static_cast<int>(w.group * w.w), tiles = (rows + kTileRows - 1) / kTileRows;
    if (!x.tensor_cores) {
      x.row_blocks = tiles;
      x.splits = Splits::of(w.n, kAnyHeads * tiles);
      x.parts = static_cast<int>(x.splits.count) * plain_groups(p.dv);
      x.shared_bytes = kTileRows * (x.pitch + 4 * kPlainKeys);
      return x;
    }
    // Three stages if they fit, and of the ways that have them the one with most warps and the longest tile. One stage
    // of 32 keys for 4 warps always fits.
    for (x.stages = 3;; --x.stages)
      for (x.warps = kWindowWarps; x.warps >= 4; x.warps /= 2) {
        x.row_warps = 1;
        while (x.row_warps < x.warps && x.row_warps < tiles) x.row_warps *= 2;
        x.key_warps = x.warps / x.row_warps;
        for (int least = 64; least >= 32; least /= 2) {
          x.tile_keys = 16 * x.key_warps > least ? 16 * x.key_warps : least;
          x.shared_bytes = int64_t{kTileRows} * x.row_warps * (x.pitch + 4) +
                           int64_t{x.stages} * x.tile_keys * (x.pitch + x.value_pitch);
          if (x.shared_bytes > shared_memory()) continue;
          x.row_blocks = (tiles + x.row_warps - 1) / x.row_warps;
          x.splits = Splits::of(w.n, kAnyHeads * x.row_blocks);
          x.parts = static_cast<int>(x.splits.count) * x.key_warps;
          return x;
        }
      }
  }

  // Threads of the plain kernel that share the keys: a thread has four channels.
  KVOPS_HOST_DEVICE static int plain_groups(int64_t dv) { return kWindowThreads / static_cast<int>(dv / 4); }
};

template <int kStages>
__device__ inline void wait_for_stage(int stages) {
  if (stages == kStages)
    wait_for_copies<kStages - 1>();
  else if constexpr (kStages > 1)
    wait_for_stage<kStages - 1>(stages);
}

// Two numbers to one register, the first below.
template <class T>
__device__ inline unsigned pack(float low, float high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&x);
  } else {
    const __half2 x = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&x);
  }
}

// A warp's 16 rows: what is known of the keys so far. Lane l has rows l / 4 (index 0) and l / 4 + 8 (1).
template <class T, int kWidth>
struct RowState {
  static constexpr int kBlocks = kWidth / 32;  // 64 bytes of a row of queries or keys
  static constexpr bool kHeld = kWidth == 128;
  uint4 held[kHeld ? kBlocks : 1][2];
  const char* queries;            // the lane's 16 bytes of its first row
  float out[kWidth / 8][4] = {};  // as of tensor cores
  float most[2];
  float sum[2] = {};          // of the lane's own keys
  int limit[2], least, last;  // the two rows', and over all 16

  __device__ uint4 query(const AttentionPlan& plan, int block, int half) const {
    if constexpr (kHeld) return held[block][half];
    return *reinterpret_cast<const uint4*>(queries + 8 * half * plan.pitch + 64 * block);
  }

  // 16 kGroups keys, from `key` on, with their rows and those of their values in shared memory. logits: null, or where
  // the two rows have theirs.
  template <int kGroups>
  __device__ void step(const WindowAttentionParams& p, const AttentionPlan& plan, int key, int first, const char* keys,
                       const char* values, float* const (&logits)[2]) {
    const Window& w = p.window;
    const int lane = threadIdx.x % 32, pieces = static_cast<int>(w.k.row_bytes / 16);
    float x[2 * kGroups][4] = {};
    keys += lane / 4 * plan.pitch + lane % 4 * 16;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (4 * block >= pieces) break;
      const uint4 a = query(plan, block, 0), b = query(plan, block, 1);
#pragma unroll
      for (int t = 0; t < 2 * kGroups; ++t) {
        const uint4 k = *reinterpret_cast<const uint4*>(keys + 8 * t * plan.pitch + 64 * block);
        mma<T>(x[t], a.x, b.x, a.y, b.y, k.x, k.y);
        mma<T>(x[t], a.z, b.z, a.w, b.w, k.z, k.w);
      }
    }
    const bool plain = first <= key && key <= least - 16 * kGroups && w.softcap == 0.0f && !logits[0];
    float finite = 0;  // NaN if a logit is not
#pragma unroll
    for (int t = 0; t < 2 * kGroups; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) finite = fmaf(x[t][e], 0.0f, finite);
    if (plain && finite == 0.0f) {
      const float scale = w.scale * kLog2e;
#pragma unroll
      for (int t = 0; t < 2 * kGroups; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[t][e] *= scale;
    } else {
#pragma unroll
      for (int t = 0; t < 2 * kGroups; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = key + 8 * t + lane % 4 * 2 + e % 2, row = e / 2;
          const bool seen = first <= j && j < limit[row];
          const float logit = logit_of(w, x[t][e], kLog2e);
          if (seen && logits[row]) logits[row][j] = logit;
          x[t][e] = seen && fabsf(logit) < CUDART_INF_F ? logit : -CUDART_INF_F;
        }
    }

    float less[2];  // what is subtracted: the new maximum, or 0 where there is none
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = most[row];
#pragma unroll
      for (int t = 0; t < 2 * kGroups; ++t) top = fmaxf(top, fmaxf(x[t][2 * row], x[t][2 * row + 1]));
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2));
      less[row] = top == -CUDART_INF_F ? 0.0f : top;
      factor[row] = exp2_fast(most[row] - less[row]);
      most[row] = top;
    }
    if (__any_sync(kWarp, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int row = 0; row < 2; ++row) sum[row] *= factor[row];
#pragma unroll
      for (int c = 0; c < kWidth / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[c][e] *= factor[e / 2];
    }
    unsigned weights[2 * kGroups][2];  // of the two rows
#pragma unroll
    for (int t = 0; t < 2 * kGroups; ++t)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float low = exp2_fast(x[t][2 * row] - less[row]), high = exp2_fast(x[t][2 * row + 1] - less[row]);
        sum[row] += low + high;
        weights[t][row] = pack<T>(low, high);
      }
    values += (lane % 16) * plan.value_pitch + lane / 16 * 16;
    const int dv = static_cast<int>(p.dv);
#pragma unroll
    for (int c = 0; c < kWidth / 16; ++c) {
      if (16 * c >= dv) break;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        unsigned v[4];
        load_matrices<true>(v, values + 16 * g * plan.value_pitch + 32 * c);
        const auto& a = weights[2 * g];
        const auto& b = weights[2 * g + 1];
        mma<T>(out[2 * c], a[0], a[1], b[0], b[1], v[0], v[1]);
        mma<T>(out[2 * c + 1], a[0], a[1], b[0], b[1], v[2], v[3]);
      }
    }
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kWindowThreads, 1)
    attention_parts_kernel(WindowAttentionParams p, AttentionPlan plan, float* parts, RowSum* sums, float* logits) {
  const Window& w = p.window;
  const int rows = kTileRows * plan.row_warps, stage_bytes = plan.tile_keys * (plan.pitch + plan.value_pitch);
  DYNAMIC_SHARED(char, queries);                                                 // [rows, pitch]
  char* const ring = queries + rows * plan.pitch;                                // [stages]: keys, then values
  int* const limits = reinterpret_cast<int*>(ring + plan.stages * stage_bytes);  // [rows]

  const int64_t head = blockIdx.x / plan.splits.count, split = blockIdx.x % plan.splits.count;
  const int64_t b = head / w.heads, h = head % w.heads;
  const int all = static_cast<int>(w.group * w.w), first_row = blockIdx.y * rows;
  const RowLayout layout{1, all, all, all};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_warp = warp % plan.row_warps, key_warp = warp / plan.row_warps;
  load_queries<T>(w, layout, b, h, first_row, rows, queries, plan.pitch, limits, plan.wide_queries);
  __syncthreads();  // queries and limits are there

  RowState<T, kWidth> state;
  const int row = first_row + row_warp * kTileRows + lane / 4;  // and 8 more
  state.queries = queries + (row - first_row) * plan.pitch + lane % 4 * 16;
  if constexpr (state.kHeld) {
#pragma unroll
    for (int block = 0; block < state.kBlocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (64 * block < w.k.row_bytes)
          state.held[block][half] = *reinterpret_cast<const uint4*>(state.queries + 8 * half * plan.pitch + 64 * block);
  }
  float* row_logits[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    state.most[i] = -CUDART_INF_F;
    state.limit[i] = limits[row - first_row + 8 * i];
    row_logits[i] = logits && row + 8 * i < all ? logits + (head * all + row + 8 * i) * w.n : nullptr;
  }
  state.least = __reduce_min_sync(kWarp, min(state.limit[0], state.limit[1]));
  state.last = __reduce_max_sync(kWarp, max(state.limit[0], state.limit[1]));
  if (logits) state.least = 0;  // every step is careful

  // This split's keys, from the first valid slot on, so that a padded row sums as it would alone.
  int most = 0;  // one past the last key that any row of the block sees
  for (int i = 0; i < rows; ++i) most = max(most, limits[i]);
  const int first = static_cast<int>(w.first(b));
  const int begin = static_cast<int>(min(first + split * plan.splits.keys, w.n));
  const int end = static_cast<int>(min(begin + plan.splits.keys, int64_t{most}));
  const int tiles = end > begin ? (end - begin - 1) / plan.tile_keys + 1 : 0;
  const auto fetch = [&](int tile) {
    const int key = begin + tile * plan.tile_keys;
    char* const keys = ring + tile % plan.stages * stage_bytes;
    const auto copy = [&](const KVView& x, char* to, int pitch, int padded, bool wide) {
      const int pieces = static_cast<int>(x.row_bytes / 16);
      const char* const from = x.row(b, h, key);
      for (int i = threadIdx.x; i < plan.tile_keys * padded; i += blockDim.x) {
        const int j = i / padded, piece = i % padded;
        uint4* const at = reinterpret_cast<uint4*>(to + j * pitch) + piece;
        const char* const source = from + j * x.stride_n + piece * 16;
        if (key + j >= end || piece >= pieces)
          *at = uint4{};
        else if (wide)
          copy_async(at, source);
        else
          *at = load_piece<T, false>(source);
      }
    };
    if (tile < tiles) {
      copy(w.k, keys, plan.pitch, static_cast<int>(w.k.row_bytes + 63) / 64 * 4, plan.wide);
      copy(p.v, keys + plan.tile_keys * plan.pitch, plan.value_pitch, static_cast<int>(p.v.row_bytes + 31) / 32 * 2,
           plan.wide_values);
    }
    end_copies();
  };
  for (int tile = 0; tile < plan.stages - 1; ++tile) fetch(tile);
  const int own_keys = plan.tile_keys / plan.key_warps;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    fetch(tile + plan.stages - 1);
    wait_for_stage<3>(plan.stages);
    __syncthreads();  // the tile is there
    const char* const keys = ring + tile % plan.stages * stage_bytes;
    const char* const values = keys + plan.tile_keys * plan.pitch;
    for (int j = key_warp * own_keys; j < (key_warp + 1) * own_keys;) {
      const int key = begin + tile * plan.tile_keys + j;
      const bool pair = own_keys >= 32;
      if (key < state.last) {
        if (pair)
          state.template step<2>(p, plan, key, first, keys + j * plan.pitch, values + j * plan.value_pitch, row_logits);
        else
          state.template step<1>(p, plan, key, first, keys + j * plan.pitch, values + j * plan.value_pitch, row_logits);
      }
      j += pair ? 32 : 16;
    }
    __syncthreads();  // the tile may be overwritten
  }
  wait_for_copies<0>();

  const int64_t part = split * plan.key_warps + key_warp;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(kWarp, sum, 1);
    sum += __shfl_xor_sync(kWarp, sum, 2);
    if (row + 8 * i >= all) continue;
    const int64_t at = (head * all + row + 8 * i) * plan.parts + part;
    if (lane % 4 == 0) sums[at] = {state.most[i], sum};
#pragma unroll
    for (int c = 0; c < kWidth / 8; ++c)
      if (8 * c < p.dv)
        *reinterpret_cast<float2*>(parts + at * p.dv + 8 * c + lane % 4 * 2) =
            make_float2(state.out[c][2 * i], state.out[c][2 * i + 1]);
  }
}

// Four elements.
template <class T>
__device__ inline float4 load_four(const char* p, bool wide) {
  const T* const x = reinterpret_cast<const T*>(p);
  if (sizeof(T) == 4 && wide) return __ldg(reinterpret_cast<const float4*>(p));
  return make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3]));
}

template <class T>
__global__ void __launch_bounds__(kWindowThreads)
    plain_attention_parts_kernel(WindowAttentionParams p, AttentionPlan plan, const float* lse, float* parts,
                                 RowSum* sums) {
  const Window& w = p.window;
  using Keys = KeyTile<T, 8>;
  DYNAMIC_SHARED(char, queries);                                                      // [16, pitch]
  float* const weights = reinterpret_cast<float*>(queries + kTileRows * plan.pitch);  // [kPlainKeys, 16]
  __shared__ int limits[kTileRows];
  __shared__ float less[kTileRows];

  const int64_t head = blockIdx.x / plan.splits.count, split = blockIdx.x % plan.splits.count;
  const int64_t b = head / w.heads, h = head % w.heads;
  const int all = static_cast<int>(w.group * w.w), first_row = blockIdx.y * kTileRows;
  const RowLayout layout{1, all, all, all};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  load_queries<T>(w, layout, b, h, first_row, kTileRows, queries, plan.pitch, limits, plan.wide_queries);
  for (int i = threadIdx.x; i < kTileRows; i += kWindowThreads)
    less[i] = first_row + i < all ? lse[head * all + first_row + i] * kLog2e : 0.0f;
  __syncthreads();  // queries, limits and lse are there

  int most = 0;
  for (int i = 0; i < kTileRows; ++i) most = max(most, limits[i]);
  const int first = static_cast<int>(w.first(b));
  const int begin = static_cast<int>(min(first + split * plan.splits.keys, w.n));
  const int end = static_cast<int>(min(begin + plan.splits.keys, int64_t{most}));
  const int columns = static_cast<int>(p.dv) / 4, groups = AttentionPlan::plain_groups(p.dv);
  const int column = threadIdx.x % columns, group = threadIdx.x / columns;

  float out[kTileRows][4] = {}, sum[kTileRows] = {};
#pragma unroll 1
  for (int key = begin; key < end; key += kPlainKeys) {
    {
      Keys keys;
      const int own = key + warp * 16;
      const char* const rows = w.k.row(b, h, own);
      const int pieces = static_cast<int>(w.k.row_bytes / 16);
      if (pieces <= 32) keys.load(rows, w.k.stride_n, end - own, pieces, 0, plan.wide);
      Products<1> x;
      multiply_all<T, 8>(x, keys, w, rows, end - own, plan.wide, queries, plan.pitch);
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = own + lane / 4 + e / 2 * 8, row = 8 * t + lane % 4 * 2 + e % 2;
          const float logit = logit_of(w, x[0][t][e], kLog2e);
          const bool counts = first <= j && j < limits[row] && fabsf(logit) < CUDART_INF_F;
          weights[(j - key) * kTileRows + row] = counts ? exp2_fast(logit - less[row]) : 0.0f;
        }
    }
    __syncthreads();  // the weights are there
    if (group < groups) {
      const int count = min(kPlainKeys, end - key);
#pragma unroll 1
      for (int j = group; j < count; j += groups) {
        const float4 v = load_four<T>(p.v.row(b, h, key + j) + column * 4 * sizeof(T), plan.wide_values);
        const float* const weight = weights + j * kTileRows;
#pragma unroll
        for (int row = 0; row < kTileRows; ++row) {
          out[row][0] = fmaf(weight[row], v.x, out[row][0]);
          out[row][1] = fmaf(weight[row], v.y, out[row][1]);
          out[row][2] = fmaf(weight[row], v.z, out[row][2]);
          out[row][3] = fmaf(weight[row], v.w, out[row][3]);
          sum[row] += weight[row];
        }
      }
    }
    __syncthreads();  // the weights may be overwritten
  }
  if (group >= groups) return;
#pragma unroll
  for (int row = 0; row < kTileRows; ++row) {
    if (first_row + row >= all) continue;
    const int64_t at = (head * all + first_row + row) * plan.parts + split * groups + group;
    if (column == 0) sums[at] = sum[row] > 0.0f ? RowSum{less[row], sum[row]} : RowSum::none();
    *reinterpret_cast<float4*>(parts + at * p.dv + 4 * column) =
        make_float4(out[row][0], out[row][1], out[row][2], out[row][3]);
  }
}

// A block for each row.
template <class T>
__global__ void __launch_bounds__(kWindowThreads)
    attention_combine_kernel(WindowAttentionParams p, int parts, const float* part_outs, const RowSum* part_sums) {
  const Window& w = p.window;
  const int64_t row = blockIdx.x, query_head = row / w.w % (w.heads * w.group);
  __shared__ RowSum warp_sums[kWindowWarps];
  const RowSum* const sums = part_sums + row * parts;
  RowSum total = RowSum::none();
  for (int i = threadIdx.x; i < parts; i += kWindowThreads) total.add(sums[i]);
#pragma unroll
  for (int step = 16; step; step /= 2)
    total.add({__shfl_xor_sync(kWarp, total.most, step), __shfl_xor_sync(kWarp, total.sum, step)});
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = total;
  __syncthreads();
  total = RowSum::none();
  for (int i = 0; i < kWindowWarps; ++i) total.add(warp_sums[i]);
  const float lse = total.sum == 0.0f ? -CUDART_INF_F : (total.most + log2f(total.sum)) * kLn2;
  if (threadIdx.x == 0) p.lse[row] = lse;
  const float less = total.sum == 0.0f ? 0.0f : total.most;
  const float factor = total.sum == 0.0f ? 0.0f : exp2_fast(less - total_log2(w, lse, query_head));
  // Four channels a thread, and a share of the parts.
  __shared__ float4 shares[kWindowThreads];
  const int columns = static_cast<int>(p.dv) / 4, groups = kWindowThreads / columns;
  const int column = threadIdx.x % columns, group = threadIdx.x / columns;
  const auto add = [](float4& x, const float4& y, float weight) {
    x.x = fmaf(y.x, weight, x.x);
    x.y = fmaf(y.y, weight, x.y);
    x.z = fmaf(y.z, weight, x.z);
    x.w = fmaf(y.w, weight, x.w);
  };
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (group < groups) {
    const float4* const outs = reinterpret_cast<const float4*>(part_outs + row * parts * p.dv) + column;
#pragma unroll 8
    for (int i = group; i < parts; i += groups) add(out, outs[i * int64_t{columns}], exp2_fast(sums[i].most - less));
  }
  shares[threadIdx.x] = out;
  __syncthreads();
  if (group > 0) return;
  for (int i = 1; i < groups; ++i) add(out, shares[i * columns + column], 1.0f);
  T* const to = reinterpret_cast<T*>(p.out) + row * p.dv + 4 * column;
  to[0] = from_float<T>(out.x * factor);
  to[1] = from_float<T>(out.y * factor);
  to[2] = from_float<T>(out.z * factor);
  to[3] = from_float<T>(out.w * factor);
}

// ---- The passes
// ------------------------------------------------------------------------------------------------------

// parts: [b, Hq, w, plan.parts, dv], each scaled by 2 to the power of minus its sum's `most`. sums: [b, Hq, w,
// plan.parts]. logits: [b, Hq, n], of one row for each query head, or null.
inline void attention_parts_cuda(const WindowAttentionParams& p, const AttentionPlan& plan, float* parts, RowSum* sums,
                                 float* logits, cudaStream_t stream) {
  const int64_t split_keys = ((p.window.n - 1) / plan.parts + 128) / 128 * 128;
  if (!logits &&
      sm90::window_pass(p.window, &p.v, plan.parts, split_keys, reinterpret_cast<float2*>(sums), parts, stream))
    return;
  const dim3 grid = grid_of(p.window.b * p.window.heads * plan.splits.count, plan.row_blocks);
  const auto run = [&](auto type, auto width) {
    launch<attention_parts_kernel<decltype(type), decltype(width)::value>>(grid, 32 * plan.warps, plan.shared_bytes,
                                                                           stream, p, plan, parts, sums, logits);
  };
  with_dtype(p.window.dtype, [&](auto type) {
    if constexpr (sizeof(type) == 2) {
      if (p.window.d <= 128 && p.dv <= 128)
        run(type, Constant<128>{});
      else
        run(type, Constant<256>{});
    }
  });
}

// The same for every dtype and width. lse: [b, Hq, w].
inline void plain_attention_parts_cuda(const WindowAttentionParams& p, const AttentionPlan& plan, const float* lse,
                                       float* parts, RowSum* sums, cudaStream_t stream) {
  with_dtype(p.window.dtype, [&](auto type) {
    launch<plain_attention_parts_kernel<decltype(type)>>(
        grid_of(p.window.b * p.window.heads * plan.splits.count, plan.row_blocks), kWindowThreads, plan.shared_bytes,
        stream, p, plan, lse, parts, sums);
  });
}

// out and lse of all parts.
inline void attention_combine_cuda(const WindowAttentionParams& p, const AttentionPlan& plan, const float* parts,
                                   const RowSum* sums, cudaStream_t stream) {
  with_dtype(p.window.dtype, [&](auto type) {
    launch<attention_combine_kernel<decltype(type)>>(grid_of(p.window.b * p.window.heads * p.window.group * p.window.w),
                                                     kWindowThreads, 0, stream, p, plan.parts, parts, sums);
  });
}

}  // namespace
}  // namespace kvops
