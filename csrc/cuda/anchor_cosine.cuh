// KeyDiff scores.
//
//   mu = sum_j k_j / |k_j|,  score_i = -cos(k_i, mu)
//
// Bytes that must move: K twice, since no score is known before the sum is complete (once if the anchor is given).
//
// There are three kernels. In anchor_sum, a block adds the keys of a unit (kTokens keys of one head) to a partial sum.
// anchor_total adds a head's partial sums to mu, in double and in an order that depends only on their number.
// anchor_score scores the slots of a unit. So no result depends on the number of blocks or on the order in which they
// run. The partial sums take 4 d bytes per kTokens keys, 0.8 % of a bf16 K, and are written and read once. The units of
// a padded row start at its first valid slot, so the row sums exactly as it would alone.
//
// The two kernels that read K fill the GPU once. Each block loops over units and receives its keys through a ring in
// shared memory (KeyStream). The ring continues across the ends of units: while a block finishes one unit, the keys of
// the next are already in flight. Each lane has 16 pieces of 16 bytes in flight, and reads only its own pieces, so the
// ring needs no barrier. That is 128 KiB in flight per multiprocessor; an H200 needs about 30 KiB to keep its memory
// busy. Both kernels go over all units in order, the second one backward, so that it first meets what L2 still holds.
//
// Keys that are not normalized may be so large that their sum overflows fp32. A warp that meets such a key scales its
// sums down from there on. The unit's partial sum records the scale, and the total, in double, gives the direction that
// keys are compared with, while mu itself is infinite.
//
// kLanes lanes share a row, and each lane group processes kUnroll rows at a time, so that their reductions over lanes
// overlap. One compare per row finds rows whose squared norm is outside the safe fp32 range (zero, NaN, infinite,
// subnormal); these are redone in double.
#pragma once
#include "../ops/anchor_cosine.h"
#include "async.cuh"
#include "rows.cuh"

namespace kvops {
namespace {

constexpr int kAnchorThreads = 256, kAnchorWarps = kAnchorThreads / 32;
constexpr int kTokens = 256;   // per unit
constexpr int kInFlight = 16;  // pieces per lane
// Blocks per multiprocessor, as far as registers allow.
template <class T, class Lanes, bool kPaged>
constexpr int kAnchorBlocks = RowPieces<T, Lanes>::kValues > (kPaged ? 8 : 16) ? 1 : 2;

constexpr float kScaledDown = 0x1p-64f;

// The keys of one unit.
struct KeySpan {
  HeadRows rows;
  int64_t begin, end;  // range of rows
};

// The keys of a block: those of units blockIdx.x, blockIdx.x + gridDim.x, ... In each step, each lane group of a warp
// gets kUnroll consecutive keys. span_of(unit) returns the range of a unit.
template <class T, class Lanes, class SpanOf>
class KeyStream {
 public:
  static constexpr int kPieces = Lanes::kPieces, kUnroll = 4 / kPieces > 1 ? 4 / kPieces : 1;
  static constexpr int kRows = kUnroll * Lanes::kRows;             // per warp and step
  static constexpr int kSteps = kTokens / kAnchorWarps / kRows;    // per unit
  static constexpr int kStages = kInFlight / (kUnroll * kPieces);  // steps in flight
  static constexpr int kBytes = 16 * kInFlight * kAnchorThreads;   // of shared memory

  __device__ KeyStream(uint4* ring, int pieces, bool wide, unsigned units, const SpanOf& span_of)
      : ring_(ring + threadIdx.x), wide_(wide), units_(units), span_of_(span_of), unit_(blockIdx.x) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) there_[j] = threadIdx.x % Lanes::kLanes + j * Lanes::kLanes < pieces;
    begin_unit();
#pragma unroll
    for (int i = 0; i < kStages; ++i) fetch();
  }

  // The lane group's first key in step `step` of a unit.
  __device__ static int64_t first(const KeySpan& span, int step) {
    return span.begin + threadIdx.x / 32 * (kTokens / kAnchorWarps) + step * kRows +
           threadIdx.x % 32 / Lanes::kLanes * kUnroll;
  }

  // Reads the keys of the next step; missing keys are 0. Call release() after their last use.
  __device__ void get(RowPieces<T, Lanes> (&keys)[kUnroll]) const {
    wait_for_copies<kStages - 1>();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int j = 0; j < kPieces; ++j) keys[u].raw[j] = widen<T>(*slot(u, j));
  }
  __device__ void release() { fetch(); }

 private:
  __device__ uint4* slot(int u, int j) const { return ring_ + ((stage_ * kUnroll + u) * kPieces + j) * kAnchorThreads; }

  __device__ void begin_unit() {
    step_ = 0;
    left_ = 0;
    if (unit_ >= units_) return;
    const KeySpan span = span_of_(unit_);
    const int64_t from = first(span, 0);
    next_ = span.rows.from(from);
    next_.data += threadIdx.x % Lanes::kLanes * kPieceBytes<T>;
    left_ = static_cast<int>(span.end - from);
  }

  __device__ void fetch() {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const char* const row = next_.row(u, u < left_);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const bool there = there_[j] && u < left_;
        const char* const from = row + j * Lanes::kLanes * kPieceBytes<T>;
        if (wide_)
          copy_async<kPieceBytes<T>>(slot(u, j), from, there);
        else
          *slot(u, j) = there ? load_raw<T, false>(from) : uint4{};
      }
    }
    end_copies();
    if (++stage_ == kStages) stage_ = 0;
    next_ = next_.from(kRows);
    left_ -= kRows;
    if (++step_ < kSteps) return;
    unit_ += gridDim.x;
    begin_unit();
  }

  uint4* ring_;                 // [kStages, kUnroll, kPieces, threads]
  bool wide_, there_[kPieces];  // there_: which of a row's pieces this lane has
  unsigned units_;
  SpanOf span_of_;
  // The step to fetch next, into the stage that get() read last.
  unsigned unit_;
  int step_, stage_ = 0, left_;  // left_: keys left in the unit, from the lane group's first one on
  HeadRows next_;                // the rows from that key on, offset to the lane's first piece
};

template <class T, class Lanes, bool kPaged>
__global__ void __launch_bounds__(kAnchorThreads, kAnchorBlocks<T, Lanes, kPaged>)
    anchor_sum_kernel(AnchorCosineParams p, float* partial_sums, float* partial_units, unsigned blocks, bool wide) {
  DYNAMIC_SHARED(uint4, ring);
  __shared__ float units_of_warps[kAnchorWarps];
  const unsigned heads = static_cast<unsigned>(p.heads), units = static_cast<unsigned>(p.b) * heads * blocks;
  const int d = static_cast<int>(p.d);
  const auto span_of = [&](unsigned unit) {
    const unsigned b = unit / blocks / heads, h = unit / blocks % heads;
    const int64_t begin = static_cast<int64_t>(unit % blocks) * kTokens;
    return KeySpan{head_rows<kPaged, T>(p.k, b, h).from(p.slots.first(b)), begin,
                   min(begin + kTokens, p.slots.count(b))};
  };
  using Stream = KeyStream<T, Lanes, decltype(span_of)>;
  constexpr int kValues = RowPieces<T, Lanes>::kValues;
  constexpr int kUnroll = Stream::kUnroll;
  float* const of_warps = reinterpret_cast<float*>(reinterpret_cast<char*>(ring) + Stream::kBytes);  // [warps, d]
  Stream stream(ring, d / kPiece<T>, wide, units, span_of);

  for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const KeySpan span = span_of(unit);
    float sum[kValues] = {}, own_unit = 1.0f;  // the warp's sums are scaled by own_unit
#pragma unroll 1
    for (int step = 0; step < Stream::kSteps; ++step) {
      RowPieces<T, Lanes> keys[kUnroll];
      stream.get(keys);
      float squares[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float x[kValues];
        keys[u].values(x);
        squares[u] = lane_dot<float>(x, x);
      }
      const float own = rows_sum<Lanes::kLanes>(squares);  // of this lane's own key
      const bool strange = __any_sync(kWarp, !comfortable(own));
      const float own_weight = p.normalize_anchor ? rsqrtf(own) : own_unit;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int its_lane = u * (Lanes::kLanes / kUnroll);
        float x[kValues], weight = __shfl_sync(kWarp, own_weight, its_lane, Lanes::kLanes);
        keys[u].values(x);
        if (strange) {
          const float its = __shfl_sync(kWarp, own, its_lane, Lanes::kLanes);
          const double exact = lanes_sum<Lanes::kLanes>(lane_dot<double>(x, x));
          const bool usable = 0 < exact && exact < CUDART_INF;  // nonzero and finite
          const double scale = p.normalize_anchor ? 1 / sqrt(exact) : 1.0;
          if (!p.normalize_anchor) {
            if (own_unit == 1.0f && __any_sync(kWarp, usable && exact >= 0x1p128)) {
              own_unit = kScaledDown;
#pragma unroll
              for (int i = 0; i < kValues; ++i) sum[i] *= kScaledDown;
            }
            weight = own_unit;
          }
          if (!comfortable(its)) {  // the warp's other rows keep their path: no row depends on its neighbours
            if (p.normalize_anchor) weight = 1.0f;
#pragma unroll
            for (int i = 0; i < kValues; ++i) x[i] = usable ? static_cast<float>(x[i] * scale) : 0.0f;
          }
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[i] += x[i] * weight;
      }
      stream.release();
    }

    // Add over lane groups, then over warps.
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
#pragma unroll
      for (int step = Lanes::kLanes; step < 32; step *= 2) sum[i] += __shfl_xor_sync(kWarp, sum[i], step);
      if (threadIdx.x % 32 < Lanes::kLanes && channel_of<T, Lanes>(i) < d)
        of_warps[threadIdx.x / 32 * d + channel_of<T, Lanes>(i)] = sum[i];
    }
    if (threadIdx.x % 32 == 0) units_of_warps[threadIdx.x / 32] = own_unit;
    __syncthreads();  // the warps' sums are written
    float least = 1.0f;
    for (int warp = 0; warp < kAnchorWarps; ++warp) least = fminf(least, units_of_warps[warp]);
    if (threadIdx.x == 0) partial_units[unit] = least;
    for (int c = threadIdx.x; c < d; c += kAnchorThreads) {
      float total = 0;
      for (int warp = 0; warp < kAnchorWarps; ++warp)
        total += of_warps[warp * d + c] * (units_of_warps[warp] == least ? 1.0f : least);
      partial_sums[static_cast<int64_t>(unit) * d + c] = total;
    }
    __syncthreads();  // they have been read and may be overwritten
  }
  wait_for_copies<0>();
}

// A head's anchor, and its direction in double. A block handles kTotalColumns times four channels; its threads divide
// the partial sums among them.
constexpr int kTotalColumns = 8, kTotalGroups = kAnchorThreads / kTotalColumns;

__global__ void __launch_bounds__(kAnchorThreads)
    anchor_total_kernel(AnchorCosineParams p, const float* partial_sums, const float* partial_units, double* directions,
                        unsigned blocks, unsigned column_blocks) {
  __shared__ double totals[kTotalGroups][kTotalColumns][4];
  const int64_t row = blockIdx.x / column_blocks, count = p.slots.count(row / p.heads);
  const int column = static_cast<int>(blockIdx.x % column_blocks) * kTotalColumns + threadIdx.x % kTotalColumns;
  const int group = threadIdx.x / kTotalColumns, columns = static_cast<int>(p.d) / 4;
  const int needed = static_cast<int>((count + kTokens - 1) / kTokens);
  const float4* const partial = reinterpret_cast<const float4*>(partial_sums + row * blocks * p.d) + column;
  double total[4] = {};
  if (column < columns) {
#pragma unroll 4
    for (int i = group; i < needed; i += kTotalGroups) {
      const float4 x = __ldg(partial + static_cast<int64_t>(i) * columns);
      const double unit = partial_units[row * blocks + i] == 1.0f ? 1.0 : 1.0 / kScaledDown;
      total[0] += x.x * unit;
      total[1] += x.y * unit;
      total[2] += x.z * unit;
      total[3] += x.w * unit;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) totals[group][threadIdx.x % kTotalColumns][i] = total[i];
  __syncthreads();  // the groups' totals are written

  // One thread per channel.
  const int its = threadIdx.x, channel = static_cast<int>(blockIdx.x % column_blocks) * 4 * kTotalColumns + its;
  if (its >= 4 * kTotalColumns || channel >= p.d) return;
  double sum = 0;
  for (int g = 0; g < kTotalGroups; ++g) sum += totals[g][its / 4][its % 4];
  const float rounded = static_cast<float>(sum);
  p.anchor[row * p.d + channel] = rounded;
  directions[row * p.d + channel] = fabsf(rounded) < CUDART_INF_F ? rounded : sum;
}

template <class T, class Lanes, bool kPaged>
__global__ void __launch_bounds__(kAnchorThreads, kAnchorBlocks<T, Lanes, kPaged>)
    anchor_score_kernel(AnchorCosineParams p, const double* directions, unsigned blocks, bool wide) {
  DYNAMIC_SHARED(uint4, ring);
  const unsigned heads = static_cast<unsigned>(p.heads), units = static_cast<unsigned>(p.b) * heads * blocks;
  const int d = static_cast<int>(p.d), lane = threadIdx.x % Lanes::kLanes;
  const auto span_of = [&](unsigned index) {
    const unsigned unit = units - 1 - index, b = unit / blocks / heads, h = unit / blocks % heads;  // backward
    const int64_t begin = static_cast<int64_t>(unit % blocks) * kTokens;
    return KeySpan{head_rows<kPaged, T>(p.k, b, h), begin, min(begin + kTokens, p.slots.first(b) + p.slots.count(b))};
  };
  using Stream = KeyStream<T, Lanes, decltype(span_of)>;
  constexpr int kValues = RowPieces<T, Lanes>::kValues;
  constexpr int kUnroll = Stream::kUnroll, kSame = Lanes::kLanes / kUnroll;  // kSame lanes get the sum of the same key
  Stream stream(ring, d / kPiece<T>, wide, units, span_of);

  float direction[kValues];  // of the anchor of head `row`
  unsigned row = ~0u;
  for (unsigned index = blockIdx.x; index < units; index += gridDim.x) {
    const KeySpan span = span_of(index);
    if (const unsigned its_row = (units - 1 - index) / blocks; its_row != row) {
      row = its_row;
      const int64_t at = static_cast<int64_t>(row) * d;
      const float* const anchor = (p.given_anchor ? p.given_anchor : p.anchor) + at;
      double squares = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        direction[i] = channel_of<T, Lanes>(i) < d ? anchor[channel_of<T, Lanes>(i)] : 0.0f;
        squares += static_cast<double>(direction[i]) * direction[i];
      }
      squares = lanes_sum<Lanes::kLanes>(squares);
      if (p.given_anchor || squares < CUDART_INF) {
        const double scale = squares == 0 ? 0.0 : 1 / sqrt(squares);
#pragma unroll
        for (int i = 0; i < kValues; ++i) direction[i] = static_cast<float>(direction[i] * scale);
      } else {  // mu overflows fp32, but its direction does not
        const auto exact = [&](int i) {
          return channel_of<T, Lanes>(i) < d ? directions[at + channel_of<T, Lanes>(i)] : 0.0;
        };
        squares = 0;
#pragma unroll
        for (int i = 0; i < kValues; ++i) squares += exact(i) * exact(i);
        const double scale = 1 / sqrt(lanes_sum<Lanes::kLanes>(squares));
#pragma unroll
        for (int i = 0; i < kValues; ++i) direction[i] = static_cast<float>(exact(i) * scale);
      }
    }
    if (p.given_anchor && span.begin == 0)
      for (int c = threadIdx.x; c < d; c += kAnchorThreads)
        p.anchor[static_cast<int64_t>(row) * d + c] = p.given_anchor[static_cast<int64_t>(row) * d + c];

    const int64_t first = p.slots.first(row / heads), last = first + p.slots.count(row / heads);
#pragma unroll 1
    for (int step = 0; step < Stream::kSteps; ++step) {
      RowPieces<T, Lanes> keys[kUnroll];
      stream.get(keys);
      float squares[kUnroll], products[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float x[kValues];
        keys[u].values(x);
        squares[u] = lane_dot<float>(x, x);
        products[u] = lane_dot<float>(x, direction);
      }
      const float own = rows_sum<Lanes::kLanes>(squares);  // of this lane's own key
      float cosine = rows_sum<Lanes::kLanes>(products) * rsqrtf(own);
      const int64_t slot = Stream::first(span, step) + lane / kSame;
      const bool there = !kPaged || slot < span.end;  // in dense memory only a unit's last keys can be missing
      if (__any_sync(kWarp, !comfortable(own) && there)) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          float x[kValues];
          keys[u].values(x);
          const double exact = lanes_sum<Lanes::kLanes>(lane_dot<double>(x, x));
          const double product = lanes_sum<Lanes::kLanes>(lane_dot<double>(x, direction));
          if (lane / kSame == u && !comfortable(own))
            cosine = exact == 0 ? 0.0f : exact < CUDART_INF ? static_cast<float>(product / sqrt(exact)) : CUDART_NAN_F;
        }
      }
      stream.release();
      if (lane % kSame == 0 && slot < p.n)
        p.scores[row * p.n + slot] = first <= slot && slot < last ? -cosine : CUDART_NAN_F;
    }
  }
  wait_for_copies<0>();
}

// Units per head; at least one, which writes the anchor.
inline int64_t anchor_blocks(const AnchorCosineParams& p) {
  return p.n > kTokens ? (p.n + kTokens - 1) / kTokens : 1;
}

struct AnchorMemory {
  float* partial_sums;   // [b, Hk, blocks, d], scaled by
  float* partial_units;  // [b, Hk, blocks]
  double* directions;    // [b, Hk, d]

  AnchorMemory(const AnchorCosineParams& p, Sections& sections) {
    const int64_t heads = p.given_anchor ? 0 : p.b * p.heads;
    partial_sums = sections.add<float>(heads * anchor_blocks(p) * p.d);
    partial_units = sections.add<float>(heads * anchor_blocks(p));
    directions = sections.add<double>(heads * p.d);
  }
};

inline void anchor_cosine_cuda(const AnchorCosineParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  if (heads == 0) return;
  const unsigned blocks = static_cast<unsigned>(anchor_blocks(p));
  const int64_t units = grid_of(heads * blocks).x;
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.n);
  Sections sections{workspace};
  const AnchorMemory memory(p, sections);
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    with_lanes<T>(p.d / kPiece<T>, [&](auto lanes) {
      using Lanes = decltype(lanes);
      constexpr int64_t kRing = 16 * kInFlight * kAnchorThreads;
      with_pages<T>(p.k, [&](auto paged) {
        const int64_t resident = int64_t{multiprocessors()} * kAnchorBlocks<T, Lanes, paged>;
        const dim3 grid = grid_of(units < resident ? units : resident);
        if (!p.given_anchor) {
          launch<anchor_sum_kernel<T, Lanes, paged>>(grid, kAnchorThreads, kRing + 4 * kAnchorWarps * p.d, stream, p,
                                                     memory.partial_sums, memory.partial_units, blocks, wide);
          const unsigned columns = static_cast<unsigned>(p.d / 4 + kTotalColumns - 1) / kTotalColumns;
          launch<anchor_total_kernel>(grid_of(heads * columns), kAnchorThreads, 0, stream, p, memory.partial_sums,
                                      memory.partial_units, memory.directions, blocks, columns);
        }
        launch<anchor_score_kernel<T, Lanes, paged>>(grid, kAnchorThreads, kRing, stream, p, memory.directions, blocks,
                                                     wide);
      });
    });
  });
}

}  // namespace
}  // namespace kvops
