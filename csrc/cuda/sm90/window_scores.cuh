// The second half of window_scores for Hopper: the scores, when the log-sum-exp of each row is known.
//
//   score[j] = sum over the rows i that see j of weight[i] exp(scale q_i . k_j - lse[i]), times one factor (means)
//
// Bytes that must move: K once. Per block of 128 keys and 128 rows, a multiprocessor of an H200 has to load 32 KB and
// do 1024 cycles of wgmma and 1024 of exponentials, all three at once. Each consumer warpgroup takes every other block
// of keys, for all tiles of rows, so one uses the tensor cores while the other computes exponentials. A column's sum is
// computed by one warpgroup: in each thread over the tiles and its two rows of each, then by shuffles in a fixed order
// over a warp's eight lanes with the same columns, then through shared memory over the four warps. The order depends
// only on the rows, so the same key gets the same bits wherever it lies.
//
// The grid has a few blocks per head, about one per multiprocessor in total, each with its own run of keys. All of a
// head's queries stay in shared memory. Non-finite logits are detected by adding x * 0, which is NaN for them.
//
// Not yet run on a GPU.
#pragma once
#include "../../ops/window_scores.h"
#include "tile.cuh"

namespace kvops::sm90 {
namespace {

template <int kDim>
constexpr int kScoreKeys = kDim > 128 ? 64 : 128;  // per block of keys

// Offsets in shared memory.
struct ScoreShared {
  int k, sums, bias, factor, limit, full, empty, bytes;  // Q, [tiles, kRows, d], comes first

  KVOPS_HOST_DEVICE ScoreShared(int tiles, int stages, int d, int keys)
      : k(tiles * kRows * d * 2),
        sums(k + stages * keys * d * 2),          // [groups, 2, warps, keys]
        bias(sums + kGroups * 2 * 4 * keys * 4),  // [rows]: RowWeight's -less
        factor(bias + tiles * kRows * 4),         // [rows]
        limit(factor + tiles * kRows * 4),        // [rows]
        full(limit + tiles * kRows * 4),
        empty(full + stages * 8),
        bytes(empty + stages * 8) {}
};

// Adds x[0, n) over a warp's eight lanes with equal lane % 4. Lane l gets 1 / 8 of the sums, starting with
// column_run<n>(l).
template <int n, int kStep = 16>
__device__ inline void add_lanes(float* x) {
  if constexpr (kStep >= 4) {
    const bool upper = threadIdx.x & kStep;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float sent = upper ? x[i] : x[i + n / 2], kept = upper ? x[i + n / 2] : x[i];
      x[i] = kept + __shfl_xor_sync(kWarp, sent, kStep);
    }
    add_lanes<n / 2, kStep / 2>(x);
  }
}
template <int n>
KVOPS_HOST_DEVICE constexpr int column_run(int lane) {
  return (lane & 16 ? n / 2 : 0) + (lane & 8 ? n / 4 : 0) + (lane & 4 ? n / 8 : 0);
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    window_scores_sm90_kernel(const __grid_constant__ TensorMap keys, const Window p, const RowValues lse,
                              const RowSum* totals, int tiles, int stages, int runs, bool wide) {
  constexpr int kKeys = kScoreKeys<kDim>, kColumns = kKeys / 4;  // columns that a thread sums: two of every eight
  unsigned char* const shared = aligned_shared();
  const ScoreShared at(tiles, stages, kDim, kKeys);
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = reinterpret_cast<T*>(shared + at.k);
  float* const bias = reinterpret_cast<float*>(shared + at.bias);
  float* const factors = reinterpret_cast<float*>(shared + at.factor);
  int* const limit = reinterpret_cast<int*>(shared + at.limit);
  Ring ring{reinterpret_cast<uint64_t*>(shared + at.full), reinterpret_cast<uint64_t*>(shared + at.empty), stages};

  // A unit is a row of p.scores: a KV head, or a query head if the group is not reduced.
  const int64_t unit = blockIdx.x / runs, group = p.group_reduce == Reduce::none ? 1 : p.group;
  const int64_t units = p.heads * p.group / group;  // per batch row
  const QueryRows rows{unit / units, unit % units * group, group};
  const int head = static_cast<int>(rows.head / p.group), batch = static_cast<int>(rows.batch);
  const Seen seen(p, rows.batch);
  const int blocks = static_cast<int>((p.n + kKeys - 1) / kKeys), run = blockIdx.x % runs;
  const int begin = static_cast<int>(static_cast<int64_t>(blocks) * run / runs),
            end = static_cast<int>(static_cast<int64_t>(blocks) * (run + 1) / runs);
  const int from = max(begin, seen.first / kKeys),
            to = min(end, (seen.last + kKeys - 1) / kKeys);  // blocks that some row sees, if from < to

  if (threadIdx.x == 0) {
    ring.init(4);
    barriers_made();
  }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {  // the producer
    if (threadIdx.x == kConsumers) {
      for (int block = from; block < to; ++block, ring.advance(1)) {
        uint64_t* const full = ring.fill(kKeys * kDim * 2);
        copy_keys<T, kDim, kKeys>(keys, full, k + ring.stage * kKeys * kDim, block * kKeys, head, batch);
      }
    }
    return;
  }

  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  float* const scores = p.scores + unit * p.n;
  for (int64_t j = static_cast<int64_t>(begin) * kKeys + threadIdx.x; j < p.n && j < static_cast<int64_t>(end) * kKeys;
       j += kConsumers)
    if (j < static_cast<int64_t>(from) * kKeys || j >= static_cast<int64_t>(to) * kKeys) scores[j] = 0;

  constexpr int kOwnRows = kRows / (kConsumers / 32);  // per warp
  for (int tile = 0; tile < tiles; ++tile)
    load_queries<T, kDim>(p, rows, tile, threadIdx.x / 32 * kOwnRows, kOwnRows, q + tile * kRows * kDim, wide);
  for (int r = threadIdx.x; r < tiles * kRows; r += kConsumers) {
    RowWeight weight{CUDART_INF_F, 1.0f};
    int its_limit = 0;
    if (r < rows.count(p)) {
      const int64_t h = rows.head + r / p.w, i = r % p.w;
      its_limit = static_cast<int>(p.limit(rows.batch, i));
      if (its_limit > seen.first) {
        const int64_t row = (rows.batch * p.heads * p.group + h) * p.w + i;
        weight = score_weight(p, totals ? totals[row] : total_of_lse(lse.at(rows.batch, h, i)), rows.batch, h, i);
      }
    }
    bias[r] = -weight.less;
    factors[r] = weight.factor;
    limit[r] = its_limit;
  }
  share_stores(kConsumers, kAllConsumers);

  const float scale = p.scale * kLog2e;
  float factor = 1;
  if (p.reduce == Reduce::mean) factor = static_cast<float>(max(seen.rows, 1));
  if (p.group_reduce == Reduce::mean) factor *= static_cast<float>(group);
  int turn = 0;
  ring.advance(warpgroup);
  for (int block = from + warpgroup; block < to; block += kGroups, ring.advance(kGroups), turn ^= 1) {
    const int key = block * kKeys;
    const bool all_seen = key >= seen.first && key + kKeys <= seen.all;
    float sums[kColumns] = {};
    ring.wait();
    for (int tile = 0; tile < tiles; ++tile) {
      float x[kKeys / 2];
      multiply_keys<T, kDim, kKeys>(x, q + tile * kRows * kDim, k + ring.stage * kKeys * kDim);
      if (tile == tiles - 1) ring.release();
      const int row = tile * kRows + Accumulator::row(thread, 0);
      const float bias0 = bias[row], bias1 = bias[row + 8], factor0 = factors[row], factor1 = factors[row + 8];
      if (all_seen && factor0 > 0.0f && factor1 > 0.0f) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float x0 = x[c / 2 * 4 + c % 2], x1 = x[c / 2 * 4 + c % 2 + 2];
          sums[c] += exp2_fast(fmaf(x0, scale, bias0)) + exp2_fast(fmaf(x1, scale, bias1));
          sums[c] = fmaf(x1, 0.0f, fmaf(x0, 0.0f, sums[c]));
        }
      } else {
        const int limit0 = limit[row] - key, limit1 = limit[row + 8] - key, first = seen.first - key;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = Accumulator::column(thread, c / 2 * 4 + c % 2);
          const float x0 = x[c / 2 * 4 + c % 2], x1 = x[c / 2 * 4 + c % 2 + 2];
          const float p0 = fmaf(x0, 0.0f, RowWeight{-bias0, factor0}.of(x0, scale)),
                      p1 = fmaf(x1, 0.0f, RowWeight{-bias1, factor1}.of(x1, scale));
          sums[c] +=
              (first <= column && column < limit0 ? p0 : 0.0f) + (first <= column && column < limit1 ? p1 : 0.0f);
        }
      }
    }

    // Add over the warp's rows, then over the warps. The groups alternate between two buffers, so one barrier per block
    // is enough.
    add_lanes<kColumns>(sums);
    float* const partial =
        reinterpret_cast<float*>(shared + at.sums) + (warpgroup * 2 + turn) * 4 * kKeys;  // [warps, keys]
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      const int its = column_run<kColumns>(lane) + c;
      partial[warp * kKeys + Accumulator::column(thread, its / 2 * 4 + its % 2)] = sums[c];
    }
    meet(128, kOwnGroup + warpgroup);
    if (thread < kKeys && key + thread < p.n)
      scores[key + thread] =
          (partial[thread] + partial[kKeys + thread] + (partial[2 * kKeys + thread] + partial[3 * kKeys + thread])) /
          factor;
  }
}

// Returns false, without doing anything, if it does not support the call. Either the totals or the lse are given.
inline bool window_scores_hopper(const Window& p, const RowValues& lse, const RowSum* totals, cudaStream_t stream) {
  if (!serves(p) || p.w == 1 || p.reduce == Reduce::max || p.group_reduce == Reduce::max) return false;
  const int64_t group = p.group_reduce == Reduce::none ? 1 : p.group, units = p.b * p.heads * p.group / group;
  const int tiles = static_cast<int>((group * p.w + kRows - 1) / kRows);
  bool served = false;
  with_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    with_head_dim(p.d, [&](auto dim) {
      constexpr int kDim = decltype(dim)::value, kKeys = kScoreKeys<kDim>;
      int stages = 4;
      while (stages > 1 && ScoreShared(tiles, stages, kDim, kKeys).bytes > kSharedBytes) --stages;
      TensorMap keys;
      if (stages == 1 || !tensor_map<T>(keys, p.k, p.b, p.heads, p.n, kKeys)) return;
      const int64_t blocks = (p.n + kKeys - 1) / kKeys, fill = multiprocessors() / units;
      const int64_t runs = fill < 1 ? 1 : fill < blocks ? fill : blocks;
      launch<window_scores_sm90_kernel<T, kDim>>(grid_of(units * runs), kThreads,
                                                 ScoreShared(tiles, stages, kDim, kKeys).bytes + 1024, stream, keys, p,
                                                 lse, totals, tiles, stages, static_cast<int>(runs), wide_queries(p));
      served = true;
    });
  });
  return served;
}

}  // namespace
}  // namespace kvops::sm90
