// LagKV scores: min-max normalize each partition by the next, take the std over channels, softmax over tokens.
//
//   N[t, c] = (X[t, c] - lo_c) / (hi_c - lo_c),  lo, hi = min, max over t of the NEXT partition Y
//   score   = softmax_t(std_c N_K) + v_weight * softmax_t(std_c N_V)
//
// Bytes that must move: K and V once. Each partition is needed twice: as the subject X, and as the reference Y of the
// one before it. So a run of one head's partitions is processed BACKWARD. When X passes through the registers, the
// range of Y is already known, and the same loaded values give X's statistics against Y and X's own range for the
// partition before. Only one partition per run is read twice.
//
// So runs should be long, and few. Blocks are as large as the partitions allow, at most a whole multiprocessor, and the
// grid fills the GPU about once. With long partitions there are too few runs to fill it. From sm_90 on, a cluster of 2,
// 4 or 8 blocks then processes a run together: each block takes a fraction of every partition's rows, and the blocks
// exchange their ranges through distributed shared memory. lag_score_plan() decides. For 8 heads of 131072 tokens it
// reads the following multiple of the bytes:
//
//   lag                        64     128     512    1024    2048    8192
//   A100, no clusters        1.03    1.02    1.05    1.09    1.19    1.44
//   H200, blocks             1.03    1.03    1.03    1.02    1.02    1.06
//     of a cluster              1       1       2       4       8       8
//   B200, blocks             1.04    1.04    1.03    1.06    1.02    1.06
//     of a cluster              1       1       2       2       8       8
//
// The ring, not the number of blocks, keeps the memory busy: asynchronous copies of the rows to come, 64 KiB per
// multiprocessor. Each lane reads only its own copies, so no barrier is needed. A row that has been processed is
// replaced by the one kRowsAhead further on, across the end of the partition too: while the block finishes one
// partition, the first rows of the next are already in flight. On an H200, 64 KiB take 1.8 us of a multiprocessor's
// share of the bandwidth, which is enough to hide the barriers.
//
// Half of the block's warps read K, half V. kLanes lanes share a row. Each lane keeps lo and 1/range of its channels as
// floats, and the new min and max in the stored dtype, two 16-bit numbers per register. A channel costs a conversion,
// four fp32 instructions, and one for min and max together. z = N - 1/2 keeps the one-pass variance accurate: about
// zero, no digits cancel. Altogether a warp issues 547 instructions per 4 KiB of bf16, 359 per 4 KiB of fp32 (nvcc
// 13.0, sm_90a, head dim 128); a multiprocessor of an H200 could issue about 880 in the time the memory takes.
//
// A partition ends with one exchange: of ranges, first within the block, then, if there is a cluster, among its blocks.
// The softmax uses the same exchange and needs no barrier of its own: a partition's largest variance travels with its
// ranges. All warps then turn variances into exponentials; their sum travels with the next exchange, and after that one
// the scores are written. This requires three buffers of variances.
//
// Rare cases cost one comparison per row. A non-finite value makes the variance of its own row non-finite; a row far
// outside the reference's range has a mean that dwarfs its variance. Such rows are marked, and recomputed in double
// after the partition has passed (careful_rows).
//
// Grid: x runs over (batch, head, run, block of the cluster). The result depends neither on the plan nor on the GPU:
// each row's sums are added within its lanes, ranges and maxima do not depend on the order, and the exponentials are
// added in fixed point, which does not either.
#pragma once
#include "../ops/lag_score.h"
#include "async.cuh"
#include "cluster.cuh"
#include "extreme.cuh"
#include "reduce.cuh"

namespace kvops {
namespace {

// One block with the maximum number of warps fills a multiprocessor's registers. Lanes with more channels need more
// registers, and so does widening fp8.
template <class T, class Lanes>
constexpr int kMostWarps = Lanes::kPieces * kPiece<T> <= 8 && sizeof(T) > 1 ? 16 : 8;
// Pieces, and rows, that a lane has in flight: 64 KiB per multiprocessor; for fp8 half the pieces.
template <class T, class Lanes>
constexpr int kPiecesAhead = (sizeof(T) > 1 ? 128 : 64) / kMostWarps<T, Lanes>;
template <class T, class Lanes>
constexpr int kRowsAhead = kPiecesAhead<T, Lanes> / Lanes::kPieces;
constexpr int kMostBlocks = 8;  // per cluster, on any GPU that has clusters

// Rows of a partition that all warps of one tensor have in flight together.
template <class T, class Lanes>
constexpr int64_t rows_per_pass(int warps) {
  return int64_t{warps} * Lanes::kRows * kRowsAhead<T, Lanes>;
}

// Pins x in a register, so that the compiler does not recompute it at every use.
__device__ inline int64_t kept(int64_t x) {
#ifdef __CUDACC__
  asm volatile("" : "+l"(x));
#endif
  return x;
}

// Infinity in each number of a word.
template <class T>
constexpr unsigned kInfinity = 0x7f800000u;
template <>
constexpr unsigned kInfinity<Half> = 0x7c007c00u;
template <>
constexpr unsigned kInfinity<BFloat16> = 0x7f807f80u;
template <class T>
constexpr unsigned kSign = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

__device__ inline uint4 shuffle_xor(uint4 x, int lanes) {
  return make_uint4(__shfl_xor_sync(kWarp, x.x, lanes), __shfl_xor_sync(kWarp, x.y, lanes),
                    __shfl_xor_sync(kWarp, x.z, lanes), __shfl_xor_sync(kWarp, x.w, lanes));
}

__device__ inline float lanes_max(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kWarp, x, step));
  return x;
}

// Recomputes the marked rows of this warp, those with an infinite variance: their variances in double, about the mean.
// A channel without a usable range contributes 0, whatever the row holds there. Returns the lane's part of the warp's
// largest finite variance.
template <class T, class Lanes, class RowAt>
__device__ inline float careful_rows(const RowAt& row_at, int rows, int d, int warp, int warps, const float* lo,
                                     const float* inverse, float* variances) {
  float most = 0.0f;
  const int lane = threadIdx.x % 32;
  const auto row_of = [&](int i) { return (i / Lanes::kRows * warps + warp) * Lanes::kRows + i % Lanes::kRows; };
  __syncwarp();  // all marks are written
#pragma unroll 1
  for (int first = 0; row_of(first) < rows; first += 32) {
    const int mine = row_of(first + lane);
    unsigned marks = __ballot_sync(kWarp, mine < rows && variances[mine] == CUDART_INF_F);
#pragma unroll 1
    for (; marks; marks &= marks - 1) {
      const int i = __ffs(marks) - 1;
      const T* const row = reinterpret_cast<const T*>(row_at(row_of(first + i)));
      const auto normalized = [&](int c) {
        return inverse[c] == 0.0f ? 0.0 : (static_cast<double>(to_float(row[c])) - lo[c]) * inverse_range(inverse[c]);
      };
      double sum = 0, squares = 0;
#pragma unroll 1
      for (int c = lane; c < d; c += 32) sum += normalized(c);
      const double mean = lanes_sum<32>(sum) / d;
#pragma unroll 1
      for (int c = lane; c < d; c += 32) {
        const double deviation = normalized(c) - mean;
        squares += deviation * deviation;
      }
      const float variance = static_cast<float>(lanes_sum<32>(squares) / (d - 1));
      if (lane == i) variances[mine] = variance;
    }
    if (mine < rows && variances[mine] < CUDART_INF_F) most = fmaxf(most, variances[mine]);  // NaN compares false
  }
  return most;
}

// A channel's range over some rows. NaN propagates.
struct Range {
  float least, most;

  __device__ static Range none() { return {CUDART_INF_F, -CUDART_INF_F}; }
  __device__ void add(float low, float high) {
    least = min_nan(least, low);
    most = max_nan(most, high);
  }
};

// The contribution of some rows to the softmax: the largest variance in the step's partition, and the sum of
// exponentials of the previous partition, in fixed point, since a sum of integers does not depend on the order.
struct Part {
  unsigned long long sum;
  float most;
};
// Reduces over groups of `lanes` neighbouring lanes; every lane gets its group's result.
__device__ inline Part lanes_whole(Part x, int lanes) {
  for (int step = lanes / 2; step; step /= 2) {
    x.sum += __shfl_xor_sync(kWarp, x.sum, step);
    x.most = fmaxf(x.most, __shfl_xor_sync(kWarp, x.most, step));
  }
  return x;
}

template <class T, class Lanes, bool kWide, bool kPaged>
__global__ void __launch_bounds__(32 * kMostWarps<T, Lanes>, 1)
    lag_score_kernel(LagScoreParams p, int cluster, int runs, float* long_variances) {
  constexpr int kLanes = Lanes::kLanes, kPieces = Lanes::kPieces, kRows = Lanes::kRows, kU = kRowsAhead<T, Lanes>;
  constexpr int kElements = kPiece<T>, kRowPieces = kLanes * kPieces, kChannels = kRowPieces * kElements;
  const int lag = static_cast<int>(p.lag), lane = threadIdx.x % 32;
  const int warps = blockDim.x / 64, z = threadIdx.x / 32 / warps, warp = threadIdx.x / 32 % warps;  // z: K or V

  // This block's rows of each partition start at `begin`.
  const int rank = blockIdx.x % cluster;
  const int begin = static_cast<int>(p.lag * rank / cluster), most_rows = (lag - 1) / cluster + 1;
  const int rows = static_cast<int>(p.lag * (rank + 1) / cluster) - begin;

  // Layout of shared memory: the pieces in flight [rows ahead][kPieces][threads]; the warps' ranges [2][warps][min,
  // max][kRowPieces]; the references [2][lo, 1/range][kChannels]; the warps' parts [2][warps]; for the whole partition
  // [2] the largest std, and the factor that turns exponentials into weight * softmax. If there is a cluster, what its
  // blocks exchange: ranges [2 steps][2][kChannels] and parts [2 steps][2]. Last, variances [3 steps][2][most_rows],
  // unless they are too long.
  DYNAMIC_SHARED(uint4, ring);
  uint4* const ranges = ring + kPiecesAhead<T, Lanes> * blockDim.x;
  float* const references = reinterpret_cast<float*>(ranges + 4 * warps * kRowPieces);
  Part* const parts = reinterpret_cast<Part*>(references + 4 * kChannels);
  float2* const wholes = reinterpret_cast<float2*>(parts + 2 * warps);
  Part* const told_parts = reinterpret_cast<Part*>(wholes + 2);
  Range* const told_ranges = reinterpret_cast<Range*>(told_parts + 4);
  float* const variances = long_variances ? long_variances + int64_t{6} * most_rows * blockIdx.x
                           : cluster > 1  ? reinterpret_cast<float*>(told_ranges + 4 * kChannels)
                                          : reinterpret_cast<float*>(told_parts);
  const auto one = [&] { return __int_as_float((127 + 30 + __clz(lag)) << 23); };  // keeps a partition's sum below 2^62
  const auto variances_of = [&](unsigned step, int of) { return variances + int64_t{step % 3 * 2 + of} * most_rows; };

  // This cluster's run [first, last) of the row's segments, and its part of the segments that the row lacks.
  const unsigned place = blockIdx.x / cluster;
  const int64_t head = place / runs, run = place % runs;
  const int64_t b = head / p.heads, h = head % p.heads;
  const int64_t segments = num_segments(p.slots.count(b), p.prefix, p.lag), missing = p.segments - segments;
  float* const scores = p.scores + head * p.segments * lag;
  const int64_t first_missing = missing * run / runs * lag, last_missing = missing * (run + 1) / runs * lag;
  for (int64_t i = first_missing + rank * blockDim.x + threadIdx.x; i < last_missing; i += cluster * blockDim.x)
    scores[segments * lag + i] = CUDART_NAN_F;
  const int64_t first = segments * run / runs, last = segments * (run + 1) / runs;
  if (first == last) return;
  for (int i = threadIdx.x; i < 4 * kChannels; i += blockDim.x) references[i] = 0.0f;

  // Each step is one partition. With self_reference every partition comes twice: once for its range, once for its
  // scores.
  const unsigned steps = static_cast<unsigned>(p.self_reference ? 2 * (last - first) : last - first + 1);
  const auto from_last = [&](unsigned step) { return p.self_reference ? step / 2 + 1 : step; };  // partitions
  const auto scored = [&](unsigned step) { return step < steps && (p.self_reference ? step % 2 : step > 0); };

  // The stream of this lane's rows through all steps. If a partition has no more rows for the lane, the last one is
  // repeated, which changes no range. Likewise, a row's first piece stands in for pieces that the row lacks: their
  // 1/range is 0.
  KVView x = z ? p.v : p.k;
  x.table = p.k.table, x.table_stride = p.k.table_stride;  // the same for V; this saves selecting them in registers
  x.page_size = p.k.page_size, x.num_pages = p.k.num_pages, x.reciprocal = p.k.reciprocal;
  const int d = static_cast<int>(z ? p.dv : p.d), pieces = static_cast<int>(x.row_bytes / 16), in_row = lane % kLanes;
  const int row_step = warps * kRows, first_row = warp * kRows + lane / kLanes;
  const int passes = (rows - 1) / (row_step * kU) + 1;
  const int64_t row_stride = kPaged ? 0 : kept(row_step * x.stride_n);
  const int start_row = first_row < rows ? first_row : rows - 1, more_rows = (rows - 1 - start_row) / row_step;
  const int column = in_row < pieces ? in_row * kPieceBytes<T> : 0;
  HeadRows start =
      head_rows<kPaged, T>(x, b, h).from(p.slots.first(b) + p.prefix + (last - from_last(0)) * lag + begin + start_row);
  start.data += column;
  HeadRows next = start;
  int left = more_rows;                               // rows of the partition after the next one
  constexpr int kTogether = kU / 4 > 1 ? kU / 4 : 1;  // rows that are fetched and waited for together
  const auto fetch = [&](int first_u) {
#pragma unroll
    for (int u = first_u; u < first_u + kTogether; ++u) {
      const char* const row = next.row(0);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (j > 0 && j * kLanes >= pieces) continue;
        const int at = j > 0 && j * kLanes + in_row < pieces ? j * kLanes * kPieceBytes<T> : 0;
        copy_piece<T, kWide>(ring + (u * kPieces + j) * blockDim.x + threadIdx.x, row + at);
      }
      if (u < left) {
        if constexpr (kPaged)
          next = next.from(row_step);
        else
          next.data += row_stride;
      }
    }
    end_copies();
    if (first_u + kTogether == kU) left -= kU;
  };
#pragma unroll
  for (int u = 0; u < kU; u += kTogether) fetch(u);

  float* const scores_of_last = scores + last * lag + begin;
  const float per_d = 1.0f / d, per_freedom = 1.0f / (d - 1);
  float lo[kPieces][kElements] = {}, inverse[kPieces][kElements] = {};
  // One extra iteration, without rows, for the last partition's softmax.
  for (unsigned step = 0; step <= steps; ++step) {
    const bool moves = step + 1 < steps && from_last(step + 1) > from_last(step);
    if (moves) start = start.from(-p.lag);  // to the next step's rows
    float* const out = variances_of(step, z);
    const bool written = scored(step);
    float most = 0.0f;  // largest variance; infinite if a row is marked
    uint4 low[kPieces], high[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      constexpr unsigned inf = kInfinity<Value<T>>, minus_inf = inf | kSign<Value<T>>;
      low[j] = make_uint4(inf, inf, inf, inf);
      high[j] = make_uint4(minus_inf, minus_inf, minus_inf, minus_inf);
    }
#pragma unroll 1
    for (int pass = step < steps ? 0 : passes; pass < passes; ++pass) {
      if (pass + 1 == passes) {
        next = start;
        left = step + 1 < steps ? more_rows : 0;  // past the end nothing is needed: repeat one row
      }
      float sums[kU] = {}, squares[kU] = {};
#pragma unroll
      for (int u = 0; u < kU; ++u) {
        if (u % kTogether == 0) wait_for_copies<kU / kTogether - 1>();
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          if (j > 0 && j * kLanes >= pieces) continue;
          const uint4 piece = widen<T>(ring[(u * kPieces + j) * blockDim.x + threadIdx.x]);
          const float half = j * kLanes + in_row < pieces ? 0.5f : 0.0f;
          float elements[kElements];
          unpack<T>(piece, elements);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const float n = fmaf(elements[e] - lo[j][e], inverse[j][e], -half);
            sums[u] += n;
            squares[u] = fmaf(n, n, squares[u]);
          }
          low[j] = extreme<Value<T>, false>(low[j], piece);
          high[j] = extreme<Value<T>, true>(high[j], piece);
        }
        if (u % kTogether == kTogether - 1) fetch(u + 1 - kTogether);
      }
      const float sum = rows_sum<kLanes>(sums), square = rows_sum<kLanes>(squares);
      const float deviation = fmaf(sum * -per_d, sum, square);
      const bool sound = deviation * 8.0f > square;  // false for NaN and infinities too
      constexpr int kSame = kLanes / kU;             // lanes that hold the same row
      const int t = (pass * kU + in_row / kSame) * row_step + first_row;
      if (written && t < rows && in_row % kSame == 0) {
        const float variance = sound ? deviation * per_freedom : CUDART_INF_F;
        out[t] = variance;
        most = fmaxf(most, variance);
      }
    }

#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int lanes = kLanes; lanes < 32; lanes *= 2) {
        low[j] = extreme<Value<T>, false>(low[j], shuffle_xor(low[j], lanes));
        high[j] = extreme<Value<T>, true>(high[j], shuffle_xor(high[j], lanes));
      }
      if (lane < kLanes) {
        uint4* const range = ranges + (z * warps + warp) * 2 * kRowPieces + j * kLanes + lane;
        range[0] = low[j];
        range[kRowPieces] = high[j];
      }
    }
    most = lanes_max(most);
    if (most == CUDART_INF_F) {
      const float* const reference = references + z * 2 * kChannels;
      const auto row_at = [&](int i) { return start.row((moves ? p.lag : 0) - start_row + i) - column; };
      most = lanes_max(careful_rows<T, Lanes>(row_at, rows, d, warp, warps, reference, reference + kChannels, out));
    }
    if (lane == 0) parts[z * warps + warp].most = most;
    __syncthreads();  // all ranges, parts and variances of the step are written

    // The range becomes the reference. A channel whose range is zero or not finite contributes N = 0.
    const auto refer = [&](int of, int c, const Range& range) {
      const float size = range.most - range.least, inv = 1.0f / size;
      const bool usable = size > 0.0f && inv > 0.0f;
      float* const reference = references + of * 2 * kChannels + c;
      reference[0] = usable ? range.least : 0.0f;
      const float told = inv < CUDART_INF_F ? inv : __uint_as_float(__float_as_uint(size) | kNarrow);
      reference[kChannels] = usable ? told : 0.0f;
    };
    const auto conclude = [&](int of, const Part& whole) {
      const double sum = static_cast<double>(whole.sum);
      wholes[of] = make_float2(sqrtf(whole.most), static_cast<float>((of ? p.v_weight : 1.0) * one() / sum));
    };
    const auto each_channel = [&](const auto& fn) {
      const int k_channels = static_cast<int>(p.d), channels = k_channels + static_cast<int>(p.dv);
      for (int i = threadIdx.x; i < channels; i += blockDim.x) {
        const int of = i < k_channels ? 0 : 1;
        fn(of, of ? i - k_channels : i);
      }
    };
    const bool last_warp = threadIdx.x / 32 == 2 * warps - 1;
    Range* const own_ranges = told_ranges + step % 2 * 2 * kChannels;
    Part* const own_parts = told_parts + step % 2 * 2;
    each_channel([&](int of, int c) {
      const Value<T>* const range = reinterpret_cast<const Value<T>*>(ranges + of * warps * 2 * kRowPieces) + c;
      Range whole = Range::none();
#pragma unroll 4
      for (int w = 0; w < warps; ++w)
        whole.add(to_float(range[2 * w * kChannels]), to_float(range[(2 * w + 1) * kChannels]));
      if (cluster > 1)
        own_ranges[of * kChannels + c] = whole;
      else
        refer(of, c, whole);
    });
    if (last_warp) {
      const Part whole = lanes_whole(parts[lane < 2 * warps ? lane : 0], warps);
      if (lane == 0 || lane == warps) {
        if (cluster > 1)
          own_parts[lane ? 1 : 0] = whole;
        else
          conclude(lane ? 1 : 0, whole);
      }
    }
    if (cluster > 1) {
      cluster_sync();  // all blocks have published; the next step uses the other buffer
      each_channel([&](int of, int c) {
        Range whole = Range::none();
#pragma unroll 4
        for (int block = 0; block < cluster; ++block) {
          const Range range = *of_block(own_ranges + of * kChannels + c, block);
          whole.add(range.least, range.most);
        }
        refer(of, c, whole);
      });
      if (last_warp) {
        const Part part = *of_block(own_parts + (lane / cluster % 2), lane % cluster);
        const Part whole = lanes_whole(part, cluster);
        if (lane == 0 || lane == cluster) conclude(lane ? 1 : 0, whole);
      }
    }
    __syncthreads();  // the reference is written; the ranges may be overwritten

    const float4* const reference = reinterpret_cast<const float4*>(references + z * 2 * kChannels);
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        const int at = ((j * kLanes + in_row) * kElements + e) / 4;
        const float4 a = reference[at], i = reference[kChannels / 4 + at];
        lo[j][e] = a.x, lo[j][e + 1] = a.y, lo[j][e + 2] = a.z, lo[j][e + 3] = a.w;
        inverse[j][e] = i.x, inverse[j][e + 1] = i.y, inverse[j][e + 2] = i.z, inverse[j][e + 3] = i.w;
      }
    // For this partition, compute the exponentials, NaN where the std is not finite. For the previous one, whose sums
    // have been exchanged by now, compute the scores. Its buffer is reused in two steps.
    if (written) {
      const float top = wholes[z].x;
      unsigned long long sum = 0;
#pragma unroll 1
      for (int t = warp * 32 + lane; t < rows; t += 32 * warps) {
        const float std = sqrtf(out[t]), e = expf(std - top);
        const bool finite = std < CUDART_INF_F;
        out[t] = finite ? e : CUDART_NAN_F;
        if (finite) sum += static_cast<unsigned long long>(e * one());
      }
      sum = lanes_sum<32>(sum);
      if (lane == 0) parts[z * warps + warp].sum = sum;
    }
    if (scored(step - 1)) {
      const float *const k = variances_of(step - 1, 0), *const v = variances_of(step - 1, 1);
      const float k_factor = wholes[0].y, v_factor = wholes[1].y;
      float* const to = scores_of_last - p.lag * from_last(step - 1);
#pragma unroll 1
      for (int t = threadIdx.x; t < rows; t += blockDim.x) to[t] = fmaf(k[t], k_factor, v[t] * v_factor);
    }
  }
  if (cluster > 1) cluster_sync();  // no other block reads this block's shared memory any more
  wait_for_copies<0>();
}

// Calls fn(T{}, RowLanes<...>{}, std::bool_constant<kWide>{}, std::bool_constant<kPaged>{}), with lanes for the wider
// rows of K and V.
template <class Fn>
inline void with_rows(const LagScoreParams& p, const Fn& fn) {
  const int64_t row_bytes = p.k.row_bytes > p.v.row_bytes ? p.k.row_bytes : p.v.row_bytes;
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.slots.n) && aligned_rows(p.v, p.b, p.heads, p.slots.n);
  with_read_dtype(p.dtype, [&](auto type) {
    with_lanes<decltype(type)>(row_bytes / 16, [&](auto lanes) {
      with_pages<decltype(type)>(p.k, [&](auto paged) {
        // With one piece per lane and row, 16 warps leave no registers for page lookups. With two pieces there are 8
        // warps.
        using Given = decltype(lanes);
        constexpr bool kMore = paged && sizeof(type) < 4 && Given::kRows == 1 && Given::kPieces == 1;
        using Lanes = std::conditional_t<kMore, RowLanes<32, 2>, Given>;
        if (wide)
          fn(type, Lanes{}, std::true_type{}, paged);
        else
          fn(type, Lanes{}, std::false_type{}, paged);
      });
    });
  });
}

// How a call is divided into blocks, and the memory they need.
struct LagScorePlan {
  int cluster;  // blocks that process a run together
  int warps;    // for K and for V, each
  int runs;     // per head
  int64_t blocks, shared_bytes, workspace_bytes;
  int64_t time;  // rows read by the busiest multiprocessor plus rows read on average: the true time lies in between
};

// The plan for clusters of the given size, with at most `at_once` of them resident.
template <class T, class Lanes>
inline LagScorePlan lag_score_plan(const LagScoreParams& p, int cluster, int at_once = 0x7fffffff) {
  constexpr int64_t kRowPieces = Lanes::kLanes * Lanes::kPieces, kChannels = kRowPieces * kPiece<T>;
  constexpr int kMost = kMostWarps<T, Lanes> / 2;
  LagScorePlan plan = {};
  plan.cluster = cluster;
  const int64_t rows = (p.lag - 1) / cluster + 1, variances = 6 * rows * static_cast<int64_t>(sizeof(float));
  const auto shared = [&]() -> int64_t {
    const int64_t of_warp = 2 * 32 * 16 * kPiecesAhead<T, Lanes> + 4 * 16 * kRowPieces + 2 * sizeof(Part);
    const int64_t told = cluster > 1 ? 4 * (kChannels * sizeof(Range) + sizeof(Part)) : 0;
    return plan.warps * of_warp + 4 * kChannels * sizeof(float) + 2 * sizeof(float2) + told;
  };
  // The largest number of warps with two passes of rows in the block's part of a partition.
  plan.warps = kMost;
  while (plan.warps > 1 && (rows < 2 * rows_per_pass<T, Lanes>(plan.warps) || shared() > shared_memory()))
    plan.warps /= 2;
  const bool fit = shared() + variances <= shared_memory();
  plan.shared_bytes = shared() + (fit ? variances : 0);
  // Try numbers of waves of clusters and take the fastest. Each allows so many runs; use only as many as keep the same
  // number of partitions per run, since a run reads one more partition than it scores.
  const int64_t heads = p.b * p.heads;
  const int by_shared = static_cast<int>(shared_memory() / plan.shared_bytes);
  const int64_t resident = std::min(at_once, multiprocessors() * std::min(kMost / plan.warps, by_shared) / cluster);
  if (resident == 0) return plan;
  for (int64_t waves = 1; waves <= 16 || !plan.time; ++waves) {
    int64_t runs = waves * resident / heads;
    if (runs > p.segments) runs = p.segments;
    if (runs == 0) continue;
    const int64_t partitions = (p.segments - 1) / runs + 1;
    runs = (p.segments - 1) / partitions + 1;
    const int64_t steps = ((heads * runs - 1) / resident + 1) * (partitions + 1);
    const int64_t longest = steps * rows * (kMost / plan.warps), all = heads * (p.segments + runs) * p.lag;
    const int64_t time = longest + all / multiprocessors();
    if (plan.time && time >= plan.time) continue;
    plan.time = time;
    plan.runs = static_cast<int>(runs);
  }
  plan.blocks = heads * plan.runs * cluster;
  plan.workspace_bytes = fit ? 0 : plan.blocks * variances;
  return plan;
}

// The best of all plans. Clusters cost barriers, so a larger cluster must gain at least a 64th.
inline LagScorePlan lag_score_plan(const LagScoreParams& p) {
  LagScorePlan best = {};
  with_rows(p, [&](auto type, auto lanes, auto wide, auto paged) {
    using T = decltype(type);
    using Lanes = decltype(lanes);
    constexpr auto kernel = lag_score_kernel<T, Lanes, wide, paged>;
    best = lag_score_plan<T, Lanes>(p, 1);
    const auto better = [&](const LagScorePlan& plan) { return plan.time && plan.time <= best.time - best.time / 64; };
    for (int cluster = 2; cluster <= kMostBlocks; cluster *= 2) {
      if (p.lag < cluster * 2 * rows_per_pass<T, Lanes>(1)) break;
      LagScorePlan plan = lag_score_plan<T, Lanes>(p, cluster);
      if (!better(plan) || !has_clusters<kernel>()) continue;
      const int at_once = resident_clusters<kernel>(cluster, dim3(64 * plan.warps), plan.shared_bytes);
      plan = lag_score_plan<T, Lanes>(p, cluster, at_once);
      if (better(plan)) best = plan;
    }
  });
  return best;
}

// workspace: plan.workspace_bytes bytes.
inline void lag_score_cuda(const LagScoreParams& p, const LagScorePlan& plan, void* workspace, cudaStream_t stream) {
  float* const long_variances = plan.workspace_bytes ? static_cast<float*>(workspace) : nullptr;
  const dim3 grid = grid_of(plan.blocks), block(64 * plan.warps);
  with_rows(p, [&](auto type, auto lanes, auto wide, auto paged) {
    constexpr auto kernel = lag_score_kernel<decltype(type), decltype(lanes), wide, paged>;
    if (plan.cluster > 1)
      launch_clusters<kernel>(plan.cluster, grid, block, plan.shared_bytes, stream, p, plan.cluster, plan.runs,
                              long_variances);
    else
      launch<kernel>(grid, block, plan.shared_bytes, stream, p, plan.cluster, plan.runs, long_variances);
  });
}

}  // namespace
}  // namespace kvops
