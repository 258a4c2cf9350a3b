// build_prototypes: the mean key of each chunk of tokens (semantic anchors excluded) and of each bucket of anchors.
//
// Bytes that must move: K once; the prototypes are smaller by a factor of n / num_chunks.
//
// One block computes one prototype: 8 heads with 131072 tokens in 496 chunks are 3968 blocks of 264 keys each. A block
// works in rounds of kListed keys. It first lists the round's keys in shared memory (those of a chunk, from which each
// thread removes some of the few anchors, or those of a bucket), then adds them, with lane groups taking turns. Keys
// are not checked one by one. If a sum is not finite, either a key is not finite or the sum has overflowed; only then
// is the round redone in double, with a check of each key.
//
// A round is summed in fp32, the rounds in double. The order depends only on the chunk's length and the head dim. Not
// yet measured on a GPU.
#pragma once
#include "../ops/build_prototypes.h"
#include "rows.cuh"

namespace kvops {
namespace {

constexpr int kMeanThreads = 128, kMeanWarps = kMeanThreads / 32;
constexpr int kListed = 512;  // keys per round

// The keys of one prototype.
struct Members {
  const int64_t* sats;  // the head's p anchors
  int64_t stride;
  const int* buckets;  // of the anchors
  int p;
  int first_valid, valid;  // slots of the row
  int bucket;              // or -1: a chunk
  int begin, count;        // range of the chunk's tokens, or of the anchors

  __device__ Members(const BuildPrototypesParams& params, int64_t b, int64_t h, int64_t prototype)
      : sats(params.sats.data + b * params.sats.stride_b + h * params.sats.stride_h),
        stride(params.sats.stride_m),
        buckets(params.buckets + (b * params.heads + h) * params.sats.m),
        p(static_cast<int>(params.sats.m)),
        first_valid(static_cast<int>(params.slots.first(b))),
        valid(static_cast<int>(params.slots.count(b))) {
    if (prototype >= params.num_chunks) {
      bucket = static_cast<int>(prototype - params.num_chunks);
      begin = 0;
      count = p;
    } else {
      const bool empty = prototype >= params.chunks(valid);
      const int64_t from = empty ? 0 : params.chunk_begin(valid, prototype);
      bucket = -1;
      begin = first_valid + static_cast<int>(from);
      count = empty ? 0 : static_cast<int>(params.chunk_begin(valid, prototype + 1) - from);
    }
  }

  // The distance of anchor i from slot `from`. Anchors before it, or out of range, wrap around to more than the number
  // of slots.
  __device__ uint64_t sat(int i, int from) const { return static_cast<uint64_t>(sats[i * stride]) - from; }

  // Lists the slots (or -1) of the round that starts at member `done`. Called by the whole block. A barrier must
  // follow, and another must separate the reads from the next round.
  __device__ void list(int done, int* slots) const {
    const int size = min(kListed, count - done), from = begin + done;
    if (bucket >= 0) {
      for (int i = threadIdx.x; i < size; i += kMeanThreads) {
        const uint64_t at = sat(from + i, first_valid);
        slots[i] =
            buckets[from + i] == bucket && at < static_cast<uint64_t>(valid) ? first_valid + static_cast<int>(at) : -1;
      }
      return;
    }
    for (int i = threadIdx.x; i < size; i += kMeanThreads) slots[i] = from + i;
    if (p == 0) return;
    __syncthreads();
    for (int i = threadIdx.x; i < p; i += kMeanThreads)
      if (const uint64_t at = sat(i, from); at < static_cast<uint64_t>(size)) slots[at] = -1;
  }
};

// Adds the listed keys, lane groups taking turns, and their number to `added`.
template <bool kWide, class T, class Lanes, int N>
__device__ inline void add_keys(const HeadRows& rows, int pieces, const int* slots, int size, float (&sum)[N],
                                int& added) {
  constexpr int kGroups = kMeanThreads / Lanes::kLanes, kUnroll = 4 / Lanes::kPieces > 1 ? 4 / Lanes::kPieces : 1;
  for (int i = threadIdx.x / Lanes::kLanes; i < size; i += kGroups * kUnroll) {
    RowPieces<T, Lanes> keys[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int slot = i + u * kGroups < size ? slots[i + u * kGroups] : -1;
      keys[u].template load<kWide>(rows.row(max(slot, 0), slot >= 0), slot < 0 ? 0 : pieces);
      added += slot >= 0;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float x[N];
      keys[u].values(x);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
  }
}

// The same in double, skipping non-finite keys.
template <class T, class Lanes, int N>
__device__ inline void add_finite_keys(const HeadRows& rows, int pieces, const int* slots, int size, double (&total)[N],
                                       int& added) {
  constexpr int kGroups = kMeanThreads / Lanes::kLanes;
  for (int begin = 0; begin < size; begin += kGroups) {
    const int i = begin + threadIdx.x / Lanes::kLanes, slot = i < size ? slots[i] : -1;
    RowPieces<T, Lanes> key;
    key.template load<false>(rows.row(max(slot, 0), slot >= 0), slot < 0 ? 0 : pieces);
    float x[N];
    key.values(x);
    int strange = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) strange += !is_finite(x[j]);
    if (lanes_sum<Lanes::kLanes>(strange) || slot < 0) continue;
    ++added;
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] += x[j];
  }
}

template <class T, class Lanes, bool kPaged>
__global__ void __launch_bounds__(kMeanThreads, RowPieces<T, Lanes>::kValues > 16  ? 2
                                                : RowPieces<T, Lanes>::kValues > 8 ? 3
                                                                                   : 4)
    build_prototypes_kernel(BuildPrototypesParams p, bool wide) {
  constexpr int kValues = RowPieces<T, Lanes>::kValues;
  DYNAMIC_SHARED(double, totals);  // [warps, d]
  __shared__ int slots[kListed], counts[kMeanWarps];
  const int64_t prototype = blockIdx.x % p.count(), head = blockIdx.x / p.count();
  const int64_t b = head / p.heads, h = head % p.heads;
  const Members members(p, b, h, prototype);
  const HeadRows rows = head_rows<kPaged, T>(p.k, b, h);
  const int d = static_cast<int>(p.d), pieces = d / kPiece<T>, warp = threadIdx.x / 32;

  double total[kValues] = {};
  int count = 0;
  for (int done = 0; done < members.count; done += kListed) {
    members.list(done, slots);
    __syncthreads();  // the round is listed
    const int size = min(kListed, members.count - done);
    float sum[kValues] = {};
    int added = 0;
    if (wide)
      add_keys<true, T, Lanes>(rows, pieces, slots, size, sum, added);
    else
      add_keys<false, T, Lanes>(rows, pieces, slots, size, sum, added);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kValues; ++i) finite = finite && is_finite(sum[i]);
    if (__syncthreads_or(!finite)) {
      add_finite_keys<T, Lanes>(rows, pieces, slots, size, total, count);
      __syncthreads();  // the list has been read
      continue;
    }
    count += added;
#pragma unroll
    for (int i = 0; i < kValues; ++i) total[i] += sum[i];
  }

  // Add over lane groups, then over warps.
#pragma unroll
  for (int step = Lanes::kLanes; step < 32; step *= 2) {
    count += __shfl_xor_sync(kWarp, count, step);
#pragma unroll
    for (int i = 0; i < kValues; ++i) total[i] += __shfl_xor_sync(kWarp, total[i], step);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    if (threadIdx.x % 32 < Lanes::kLanes && channel_of<T, Lanes>(i) < d)
      totals[warp * d + channel_of<T, Lanes>(i)] = total[i];
  if (threadIdx.x % 32 == 0) counts[warp] = count;
  __syncthreads();
  count = 0;
  for (int w = 0; w < kMeanWarps; ++w) count += counts[w];
  for (int c = threadIdx.x; c < d; c += kMeanThreads) {
    double whole = 0;
    for (int w = 0; w < kMeanWarps; ++w) whole += totals[w * d + c];
    p.prototypes[(head * p.count() + prototype) * d + c] = count ? static_cast<float>(whole / count) : 0.0f;
  }
  if (threadIdx.x == 0) p.counts[head * p.count() + prototype] = count;
}

inline void build_prototypes_cuda(const BuildPrototypesParams& p, cudaStream_t stream) {
  const int64_t prototypes = p.b * p.heads * p.count();
  if (prototypes == 0) return;
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.n);
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_lanes<T>(p.d / kPiece<T>, [&](auto lanes) {
      with_pages<T>(p.k, [&](auto paged) {
        launch<build_prototypes_kernel<T, decltype(lanes), paged>>(grid_of(prototypes), kMeanThreads,
                                                                   8 * kMeanWarps * p.d, stream, p, wide);
      });
    });
  });
}

}  // namespace
}  // namespace kvops
