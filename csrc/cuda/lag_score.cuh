// LagKV's scores: each partition min-max normalized by the next, std over channels, softmax over tokens.
//
//   N[t, c] = (X[t, c] - lo_c) / (hi_c - lo_c),  lo, hi = min, max over t of the NEXT partition Y
//   score   = softmax_t(std_c N_K) + v_weight * softmax_t(std_c N_V)
//
// Bytes that must move: K and V once. A partition is needed twice, as the subject X and as the reference Y of the one
// before it. So a block owns a run of partitions of one head and walks it BACKWARD: when X passes through its
// registers, the range of Y is already known, and the same loaded values give X's statistics against Y and X's own
// range for the partition before. What is read twice is one partition for each run.
//
// So runs should be long, and few: blocks are as large as the partitions allow, at most a whole multiprocessor, and the
// grid fills the GPU about once (lag_score_plan). With 8 heads of 131072 tokens on 132 multiprocessors the partitions
// read twice are 3 % of all at a lag of 128, 13 % at 1024. What keeps the memory busy is not the number of blocks but
// the ring: 64 KiB on each multiprocessor, asynchronous copies of the rows to come, each lane's for itself alone, so
// that no barrier is needed. A row that has passed is replaced by the one kRowsAhead further on, across the end of the
// partition too: while the block finishes one partition, the first rows of the next are on their way.
//
// Half of the block's warps read K, half V. A row is shared by kLanes lanes. Each keeps lo and 1/range of its channels
// as floats, the new min and max as they are stored, two 16-bit numbers to a register; a channel costs a conversion,
// four fp32 instructions and one for min and max. z = N - 1/2 makes the one-pass variance accurate: about zero it loses
// nothing. All in all a warp issues 572 instructions for 4 KiB of bf16, 382 for 4 KiB of fp32 (nvcc 13.0, sm_90a, head
// dim 128), where a multiprocessor of an H200 could issue about 880 in the time that the memory takes.
//
// After a partition come two barriers: all warps' ranges and variances are written (first), the ranges have become the
// next reference (second). Then one warp, each time another, turns the variances to scores while the others go on;
// there are two buffers of variances for that.
//
// What is rare costs one comparison for each row: a value that is not finite makes the variance of its own row so; a
// row far outside of the reference's range has a mean that dwarfs its variance. Such rows are marked, and done again in
// double when the partition has passed (careful_rows).
//
// Grid: x runs over (batch, head, run). The result depends neither on the runs nor on the size of blocks: a row's sums
// are added within its lanes, a range has no order, and one warp does the softmax. Not yet measured on a GPU.
#pragma once
#include "../ops/lag_score.h"
#include "async.cuh"
#include "reduce.cuh"

namespace kvops {
namespace {

// One block of the most warps fills a multiprocessor's registers: the more channels a lane has, the more it needs.
template <class T, class Lanes>
constexpr int kMostWarps = Lanes::kPieces * kPiece<T> <= 8 ? 16 : 8;
// Pieces that a lane has in flight, and rows: 64 KiB on each multiprocessor.
template <class T, class Lanes>
constexpr int kAhead = 128 / kMostWarps<T, Lanes>;
template <class T, class Lanes>
constexpr int kRowsAhead = kAhead<T, Lanes> / Lanes::kPieces;
constexpr int64_t kSharedLag = 1024;  // the variances of longer partitions lie in global memory
constexpr float kMarked = -1.0f;      // in the place of a variance: the row has to be done with care

// Rows of a partition that the warps of one tensor have in flight together.
template <class T, class Lanes>
constexpr int64_t rows_per_pass(int warps) {
  return int64_t{warps} * Lanes::kRows * kRowsAhead<T, Lanes>;
}

// A piece on its way to shared memory. A thread waits for its own copies only, and reads no others.
template <class T, bool kWide>
__device__ inline void copy_piece(uint4* to, const char* from) {
  if constexpr (!kWide) {
#pragma unroll 2  // a piece at once would spill
    for (int i = 0; i < 4; ++i) reinterpret_cast<unsigned*>(to)[i] = load_word<T>(from + 4 * i);
  } else {
    copy_async(to, from);
  }
}
// x, in a register from here on: not multiplied out again wherever it is needed.
__device__ inline int64_t kept(int64_t x) {
#ifdef __CUDACC__
  asm volatile("" : "+l"(x));
#endif
  return x;
}

// A word of a piece is one float, or two 16-bit numbers side by side.
template <class T>
constexpr unsigned kInfinity = 0x7f800000u;
template <>
constexpr unsigned kInfinity<Half> = 0x7c007c00u;
template <>
constexpr unsigned kInfinity<BFloat16> = 0x7f807f80u;
template <class T>
constexpr unsigned kSign = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

// The min (or max) of each number of two words. NaN, if there is one, wins.
template <class T, bool Max>
__device__ inline unsigned extreme(unsigned a, unsigned b) {
  if constexpr (sizeof(T) == 4) {
    const float x = __uint_as_float(a), y = __uint_as_float(b);
    return __float_as_uint(Max ? max_nan(x, y) : min_nan(x, y));
  } else {
#ifdef __CUDACC__
    constexpr bool half = kInfinity<T> == kInfinity<Half>;
    unsigned r;
    if constexpr (half && Max) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    if constexpr (half && !Max) asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    if constexpr (!half && Max) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    if constexpr (!half && !Max) asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    const auto pick = [](unsigned i, unsigned j) {
      const float x = to_float(T{static_cast<uint16_t>(i)}), y = to_float(T{static_cast<uint16_t>(j)});
      return x != x || (Max ? x > y : x < y) ? i : j;
    };
    return pick(a & 0xffffu, b & 0xffffu) | pick(a >> 16, b >> 16) << 16;
#endif
  }
}
template <class T, bool Max>
__device__ inline uint4 extreme(uint4 a, uint4 b) {
  return make_uint4(extreme<T, Max>(a.x, b.x), extreme<T, Max>(a.y, b.y), extreme<T, Max>(a.z, b.z),
                    extreme<T, Max>(a.w, b.w));
}
__device__ inline uint4 shuffle_xor(uint4 x, int lanes) {
  return make_uint4(__shfl_xor_sync(kWarp, x.x, lanes), __shfl_xor_sync(kWarp, x.y, lanes),
                    __shfl_xor_sync(kWarp, x.z, lanes), __shfl_xor_sync(kWarp, x.w, lanes));
}

// The marked ones of this warp's rows in a partition: their variances in double, about the mean. A channel that has no
// usable range contributes 0, whatever the row holds there.
template <class T, class Lanes>
__device__ inline void careful_rows(const char* partition, int64_t stride, int lag, int d, int warp, int warps,
                                    const float* lo, const float* inverse, float* variances) {
  const int lane = threadIdx.x % 32;
  const auto row_of = [&](int i) { return (i / Lanes::kRows * warps + warp) * Lanes::kRows + i % Lanes::kRows; };
  __syncwarp();  // all marks are written
#pragma unroll 1
  for (int first = 0; row_of(first) < lag; first += 32) {
    const int mine = row_of(first + lane);
    unsigned marks = __ballot_sync(kWarp, mine < lag && variances[mine] == kMarked);
#pragma unroll 1
    for (; marks; marks &= marks - 1) {
      const int i = __ffs(marks) - 1;
      const T* const row = reinterpret_cast<const T*>(partition + row_of(first + i) * stride);
      const auto normalized = [&](int c) {
        return inverse[c] == 0.0f ? 0.0 : (static_cast<double>(to_float(row[c])) - lo[c]) * inverse[c];
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
      const double variance = lanes_sum<32>(squares) / (d - 1);
      if (lane == i) variances[mine] = static_cast<float>(variance);
    }
  }
}

// By one warp: variances [lag] -> exp(std - the largest), in place, NaN where the std is not finite. Returns the factor
// that makes them a softmax times weight. Each lane sees only its own elements, and adds in double: accurate however
// long the partition.
__device__ inline float exponentials(float* x, int lag, float weight) {
  const int lane = threadIdx.x % 32;
  float most = 0.0f;
  for (int t = lane; t < lag; t += 32) most = fmaxf(most, x[t] < CUDART_INF_F ? x[t] : 0.0f);  // NaN compares false
  for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(kWarp, most, step));
  const float top = sqrtf(most);
  double total = 0;
  for (int t = lane; t < lag; t += 32) {
    const float std = sqrtf(x[t]);
    const bool finite = std < CUDART_INF_F;
    const float e = expf(std - top);
    x[t] = finite ? e : CUDART_NAN_F;
    if (finite) total += e;
  }
  return static_cast<float>(weight / lanes_sum<32>(total));
}

template <class T, class Lanes, bool kWide>
__global__ void __launch_bounds__(32 * kMostWarps<T, Lanes>, 1)
    lag_score_kernel(LagScoreParams p, int runs, float* long_variances) {
  constexpr int kLanes = Lanes::kLanes, kPieces = Lanes::kPieces, kRows = Lanes::kRows, kU = kRowsAhead<T, Lanes>;
  constexpr int kElements = kPiece<T>, kRowPieces = kLanes * kPieces, kChannels = kRowPieces * kElements;
  const int lag = static_cast<int>(p.lag), lane = threadIdx.x % 32;
  const int warps = blockDim.x / 64, z = threadIdx.x / 32 / warps, warp = threadIdx.x / 32 % warps;  // z: of K or of V

  // In shared memory: pieces on their way [rows ahead][kPieces][threads], ranges [2][warps][min, max][kRowPieces],
  // references [2][lo, 1/range][kChannels], and, unless they are long, variances [2 buffers][2][lag].
  DYNAMIC_SHARED(uint4, ring);
  uint4* const ranges = ring + kAhead<T, Lanes> * blockDim.x;
  float* const references = reinterpret_cast<float*>(ranges + 4 * warps * kRowPieces);
  float* const variances = long_variances ? long_variances + int64_t{4} * lag * blockIdx.x : references + 4 * kChannels;

  // This block's run [first, last) of the row's segments, and its share of the segments that the row lacks.
  const int64_t head = blockIdx.x / runs, run = blockIdx.x % runs, b = head / p.heads, h = head % p.heads;
  const int64_t segments = num_segments(p.slots.count(b), p.prefix, p.lag), missing = p.segments - segments;
  float* const scores = p.scores + head * p.segments * lag;
  for (int64_t i = missing * run / runs * lag + threadIdx.x; i < missing * (run + 1) / runs * lag; i += blockDim.x)
    scores[segments * lag + i] = CUDART_NAN_F;
  const int64_t first = segments * run / runs, last = segments * (run + 1) / runs;
  if (first == last) return;
  for (int i = threadIdx.x; i < 4 * kChannels; i += blockDim.x) references[i] = 0.0f;

  // Each step is one partition. With self_reference every partition comes twice: for its range, for its scores.
  const unsigned steps = static_cast<unsigned>(p.self_reference ? 2 * (last - first) : last - first + 1);
  const auto partition_of = [&](unsigned step) { return p.self_reference ? last - 1 - step / 2 : last - step; };

  // The stream of this lane's rows, through all steps. Where a partition has no more rows for the lane, the last one
  // comes again: it changes no range. So does a row's first piece for the pieces it lacks: their 1/range is 0.
  const KVView x = z ? p.v : p.k;
  const int d = static_cast<int>(z ? p.dv : p.d), pieces = static_cast<int>(x.row_bytes / 16), in_row = lane % kLanes;
  const char* const grid = x.row(b, h, p.slots.first(b) + p.prefix);
  const int row_step = warps * kRows, first_row = warp * kRows + lane / kLanes;
  const int passes = (lag - 1) / (row_step * kU) + 1;
  const int64_t row_stride = kept(row_step * x.stride_n);
  const int start_row = first_row < lag ? first_row : lag - 1, more_rows = (lag - 1 - start_row) / row_step;
  const int column = in_row < pieces ? in_row * 16 : 0;
  const auto start_of = [&](unsigned step) {
    return grid + (partition_of(step) * lag + start_row) * x.stride_n + column;
  };
  const char* next = start_of(0);
  int left = more_rows;                               // rows of the partition behind the next
  constexpr int kTogether = kU / 4 > 1 ? kU / 4 : 1;  // rows that are fetched and waited for together
  const auto fetch = [&](int first_u) {
#pragma unroll
    for (int u = first_u; u < first_u + kTogether; ++u) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (j > 0 && j * kLanes >= pieces) continue;
        const int at = j > 0 && j * kLanes + in_row < pieces ? j * kLanes * 16 : 0;
        copy_piece<T, kWide>(ring + (u * kPieces + j) * blockDim.x + threadIdx.x, next + at);
      }
      if (u < left) next += row_stride;
    }
    end_copies();
    if (first_u + kTogether == kU) left -= kU;
  };
#pragma unroll
  for (int u = 0; u < kU; u += kTogether) fetch(u);

  const float per_d = 1.0f / d, per_freedom = 1.0f / (d - 1);
  float lo[kPieces][kElements] = {}, inverse[kPieces][kElements] = {};
  for (unsigned step = 0; step < steps; ++step) {
    const bool scored = p.self_reference ? step % 2 : step > 0;
    const char* const start = start_of(step + 1 < steps ? step + 1 : step);  // behind the end nothing new is needed
    float* const out = variances + (step % 2 * 2 + z) * static_cast<int64_t>(lag);
    int marked = 0;
    uint4 low[kPieces], high[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      constexpr unsigned inf = kInfinity<T>, minus_inf = inf | kSign<T>;
      low[j] = make_uint4(inf, inf, inf, inf);
      high[j] = make_uint4(minus_inf, minus_inf, minus_inf, minus_inf);
    }
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      if (pass + 1 == passes) {
        next = start;
        left = more_rows;
      }
      float sums[kU] = {}, squares[kU] = {};
#pragma unroll
      for (int u = 0; u < kU; ++u) {
        if (u % kTogether == 0) wait_for_copies<kU / kTogether - 1>();
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          if (j > 0 && j * kLanes >= pieces) continue;
          const uint4 piece = ring[(u * kPieces + j) * blockDim.x + threadIdx.x];
          const float half = j * kLanes + in_row < pieces ? 0.5f : 0.0f;
          float elements[kElements];
          unpack<T>(piece, elements);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const float n = fmaf(elements[e] - lo[j][e], inverse[j][e], -half);
            sums[u] += n;
            squares[u] = fmaf(n, n, squares[u]);
          }
          low[j] = extreme<T, false>(low[j], piece);
          high[j] = extreme<T, true>(high[j], piece);
        }
        if (u % kTogether == kTogether - 1) fetch(u + 1 - kTogether);
      }
      const float sum = rows_sum<kLanes>(sums), square = rows_sum<kLanes>(squares);
      const float deviation = fmaf(sum * -per_d, sum, square);
      const bool sound = deviation * 8.0f > square;  // false for NaN and infinities too
      constexpr int kSame = kLanes / kU;             // lanes that got the same row
      const int t = (pass * kU + in_row / kSame) * row_step + first_row;
      if (scored && t < lag && in_row % kSame == 0) {
        out[t] = sound ? deviation * per_freedom : kMarked;
        marked |= !sound;
      }
    }

#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int lanes = kLanes; lanes < 32; lanes *= 2) {
        low[j] = extreme<T, false>(low[j], shuffle_xor(low[j], lanes));
        high[j] = extreme<T, true>(high[j], shuffle_xor(high[j], lanes));
      }
      if (lane < kLanes) {
        uint4* const range = ranges + (z * warps + warp) * 2 * kRowPieces + j * kLanes + lane;
        range[0] = low[j];
        range[kRowPieces] = high[j];
      }
    }
    if (__any_sync(kWarp, marked)) {
      const float* const reference = references + z * 2 * kChannels;
      careful_rows<T, Lanes>(grid + partition_of(step) * lag * x.stride_n, x.stride_n, lag, d, warp, warps, reference,
                             reference + kChannels, out);
    }
    __syncthreads();  // all ranges and variances of the step are written

    // The range becomes the reference. A channel whose range is zero or not finite contributes N = 0.
    for (int64_t i = threadIdx.x; i < p.d + p.dv; i += blockDim.x) {
      const int of = i < p.d ? 0 : 1, c = static_cast<int>(of ? i - p.d : i);
      const T* const range = reinterpret_cast<const T*>(ranges + of * warps * 2 * kRowPieces) + c;
      float least = CUDART_INF_F, most = -CUDART_INF_F;
      for (int w = 0; w < warps; ++w) {
        least = min_nan(least, to_float(range[2 * w * kChannels]));
        most = max_nan(most, to_float(range[(2 * w + 1) * kChannels]));
      }
      const float size = most - least, inv = 1.0f / size;
      const bool usable = size > 0.0f && inv > 0.0f && inv < CUDART_INF_F;
      float* const reference = references + of * 2 * kChannels + c;
      reference[0] = usable ? least : 0.0f;
      reference[kChannels] = usable ? inv : 0.0f;
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
    // This buffer of variances is written again two steps on, when this warp has been to the next step's barriers.
    if (scored && threadIdx.x / 32 == step / (p.self_reference ? 2 : 1) % (2 * warps)) {
      float* const k = variances + step % 2 * 2 * static_cast<int64_t>(lag);
      const float k_scale = exponentials(k, lag, 1.0f), v_scale = exponentials(k + lag, lag, p.v_weight);
      for (int t = lane; t < lag; t += 32)
        scores[partition_of(step) * lag + t] = fmaf(k[t], k_scale, k[lag + t] * v_scale);
    }
  }
  wait_for_copies<0>();
}

// fn(T{}, RowLanes<...>{}) for the wider rows of the two.
template <class Fn>
inline void with_rows(const LagScoreParams& p, const Fn& fn) {
  const int64_t row_bytes = p.k.row_bytes > p.v.row_bytes ? p.k.row_bytes : p.v.row_bytes;
  with_dtype(p.dtype,
             [&](auto type) { with_lanes<decltype(type)>(row_bytes / 16, [&](auto lanes) { fn(type, lanes); }); });
}

// How a call is cut into blocks, and what they need.
struct LagScorePlan {
  int warps;  // of K and of V, each
  int runs;   // of each head
  int64_t blocks, shared_bytes, workspace_bytes;
};

inline LagScorePlan lag_score_plan(const LagScoreParams& p) {
  LagScorePlan plan = {};
  with_rows(p, [&](auto type, auto lanes) {
    using T = decltype(type);
    using Lanes = decltype(lanes);
    constexpr int64_t kRowPieces = Lanes::kLanes * Lanes::kPieces;
    const int64_t variances = 4 * p.lag * sizeof(float);
    const auto shared = [&] {
      const int64_t own = 64 * kAhead<T, Lanes> + 4 * kRowPieces, all = kRowPieces * kPiece<T>;
      return 16 * (plan.warps * own + all) + (p.lag <= kSharedLag ? variances : 0);
    };
    // The most warps that find two passes of rows in a partition.
    plan.warps = kMostWarps<T, Lanes> / 2;
    while (plan.warps > 1 && (p.lag < 2 * rows_per_pass<T, Lanes>(plan.warps) || shared() > shared_memory()))
      plan.warps /= 2;
    plan.shared_bytes = shared();
    // As many runs as fit into so many waves of blocks, for the number of waves that ends first. A run reads one
    // partition more than it scores.
    const int64_t heads = p.b * p.heads;
    const int64_t resident = int64_t{multiprocessors()} * (kMostWarps<T, Lanes> / 2 / plan.warps);
    int64_t shortest = 0;
    for (int64_t waves = 1; waves <= 16 || shortest == 0; ++waves) {
      int64_t runs = waves * resident / heads;
      if (runs > p.segments) runs = p.segments;
      if (runs == 0) continue;
      const int64_t time = ((heads * runs - 1) / resident + 1) * ((p.segments - 1) / runs + 2);
      if (shortest && time >= shortest) continue;
      shortest = time;
      plan.runs = static_cast<int>(runs);
    }
    plan.blocks = heads * plan.runs;
    plan.workspace_bytes = p.lag <= kSharedLag ? 0 : plan.blocks * variances;
  });
  return plan;
}

// workspace: plan.workspace_bytes.
inline void lag_score_cuda(const LagScoreParams& p, const LagScorePlan& plan, void* workspace, cudaStream_t stream) {
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.slots.n) && aligned_rows(p.v, p.b, p.heads, p.slots.n);
  float* const long_variances = plan.workspace_bytes ? static_cast<float*>(workspace) : nullptr;
  const dim3 grid = grid_of(plan.blocks), block(64 * plan.warps);
  with_rows(p, [&](auto type, auto lanes) {
    using T = decltype(type);
    using Lanes = decltype(lanes);
    if (wide)
      launch<lag_score_kernel<T, Lanes, true>>(grid, block, plan.shared_bytes, stream, p, plan.runs, long_variances);
    else
      launch<lag_score_kernel<T, Lanes, false>>(grid, block, plan.shared_bytes, stream, p, plan.runs, long_variances);
  });
}

}  // namespace
}  // namespace kvops
