// The attention of a window's rows, or of one decode step: partial results over runs of keys, and their combination.
// The scores come from window_scores' passes, with the lse computed here.
//
//   out[i] = sum over j of exp(logit[i, j] - lse[i]) v_j,   lse[i] = log(sum over j of exp(logit[i, j]))
//
// Bytes that must move: K and V once; for the scores, K once more (w > 1), or the logits of one row per query head,
// written and read: 8 G bytes per key.
//
// attention_parts (16-bit types, head dims up to 256): FlashAttention-2, split over the keys. A block has 4 or 8 warps.
// They divide the rows among them, 16 each (8 if there are no more than 8); with fewer rows than that, they divide the
// keys too, so that decoding keeps all warps busy. K and V arrive by cp.async in a ring of stages in shared memory, and
// each warp copies 16 keys of a stage. A lane copies one 16-byte column of every second row, so the loop only
// increments two addresses, and only the last tile of a split checks for the end. Warps with the same rows use only the
// keys that they copied themselves and wait for no other warp; warps with the same keys meet at a barrier. Each warp
// has its rows' maximum, sum and out in registers. At the end, warps with the same rows add theirs in shared memory,
// always in the same order, so a block produces one part for each of its rows.
//
// As in window.cuh, the query rows are the columns of the products, of which the tensor core has 8, not its 16 rows:
// keys times queries give the logits of 16 keys, and values, transposed by ldmatrix, times weights give 16 channels of
// out. The weights are transposed between the two (movmatrix). The maximum of a row is the same in all lanes and rises
// only a few times per split: a vote per step finds out whether a logit exceeds it, and only then do the lanes exchange
// logits and scale out. The vote also finds NaN and infinity.
//
// Decode (w = 1, G = 4, bf16, d = 128, 8 heads, n = 131072) on an H200: 537 MB of K and V take 128 us at the 4.19 TB/s
// of a copy, and the logits, if the scores are requested, are 17 MB, which the scores' kernel finds in L2. A
// multiprocessor gets a key (512 bytes) every 29 cycles, in which its schedulers can issue 116 instructions. A key
// takes about 26, counted in the machine code for sm_90a. Two blocks of 4 warps with 3 stages of 32 KB have 128 to 192
// KB in flight, where 4.8 TB/s at 800 ns latency need 29 KB. So the kernel should be memory-bound. With all 16 rows of
// the tensor cores, maxima exchanged in every step, and 43 instructions per key it was not: measured 166 us, with no
// warp able to issue in 67 % of the cycles, at 3.35 TB/s.
//
// If keys are rotated at their slots, a decode step (w = 1) rotates them in shared memory. Each warp rotates the 16
// keys that it copied. It reads their cosines and sines, 8 bytes per pair, before it waits for the keys. All heads need
// these tables. The heads' blocks for the same split run at the same time, so all but the first find them in L2, which
// then delivers twice the bytes of K and V. Other calls read K more than once, or add biases, for which the registers
// do not suffice, so rope_at_slots rotates it into the workspace first, once.
//
// attention_combine: one block per row and 32 channels adds the row's parts in order.
//
// plain_attention_parts (fp32, wider heads): the maxima from window_scores' first pass make a running maximum
// unnecessary. 8 warps compute the weights of 128 keys for 16 rows, then every thread accumulates four channels over
// some of the keys. It uses CUDA cores, reads K three times, and rereads K and V for every 16 rows (from L2): correct,
// but not fast.
//
// Grid: x runs over (batch, KV head, split, run of rows), the last fastest. Blocks with the same keys run at the same
// time, so DRAM is read once and the others find K and V in L2. Splits depend on the number of keys and rows, but not
// on the heads, the batch or the GPU (window.cuh).
#pragma once
#include <cfloat>

#include "../ops/window_attention.h"
#include "async.cuh"
#include "rope.cuh"
#include "sm90/hopper.h"
#include "window.cuh"

namespace kvops {
namespace {

constexpr int64_t kTensorCoreDim = 256;
constexpr int kGroupKeys = 16;                             // that a warp copies at a time
constexpr int kPlainKeys = 16 * kWindowWarps;              // per step of the plain kernel
constexpr int kCombiners = 8, kCombined = 4 * kCombiners;  // threads that combine a part, and their channels

// How a call is divided. Everything that a result depends on, so all but the number of stages, follows from the shapes
// alone.
struct AttentionPlan {
  bool tensor_cores;
  bool turns;               // rotate keys in shared memory; otherwise they have been rotated beforehand
  bool wide, wide_queries;  // 16-byte aligned rows of keys and values, and of queries
  int warp_rows;            // rows per warp, 8 or 16
  int warps, row_warps;     // per block: row_warps cover the rows; warps / row_warps groups divide the keys
  int stages;
  int pitch;  // bytes from one row of queries to the next, for the plain kernel
  int row_blocks;
  Splits splits;
  int parts;  // per row
  int64_t shared_bytes;

  // memory: shared memory that a block may use, in bytes. least_rows: of a warp, 8 or 16.
  static AttentionPlan of(const WindowAttentionParams& p, int64_t memory = shared_memory(), int least_rows = 8) {
    const Window& w = p.window;
    AttentionPlan x = {};
    x.tensor_cores = w.dtype != DType::f32 && w.d <= kTensorCoreDim && p.dv <= kTensorCoreDim;
    x.turns = w.rope.pairs && x.tensor_cores && w.w == 1 && !w.key_bias.data;  // registers do not hold both
    x.wide = aligned_rows(w.k, w.b, w.heads, w.n) && aligned_rows(p.v, w.b, w.heads, w.n);
    x.wide_queries = aligned_queries(w);
    const int rows = static_cast<int>(w.group * w.w);
    x.warp_rows = x.tensor_cores && rows <= least_rows ? least_rows : kTileRows;
    const int tiles = (rows + x.warp_rows - 1) / x.warp_rows;
    if (!x.tensor_cores) {
      x.pitch = query_pitch(w.k.row_bytes);
      x.row_blocks = tiles;
      x.splits = Splits::fixed(w.n, tiles);
      x.parts = static_cast<int>(x.splits.count) * plain_groups(p.dv);
      x.shared_bytes = kTileRows * (x.pitch + 4 * kPlainKeys);
      return x;
    }
    const int width = tile_width(p);
    x.warps = width == 128 && tiles > 4 ? 8 : 4;
    x.row_warps = 1;
    while (x.row_warps < x.warps && x.row_warps < tiles) x.row_warps *= 2;
    x.row_blocks = (tiles + x.row_warps - 1) / x.row_warps;
    x.splits = Splits::fixed(w.n, x.row_blocks);
    x.parts = static_cast<int>(x.splits.count);
    // Two blocks per multiprocessor, if each can have two stages, so that one copies while the other starts or ends.
    constexpr int64_t reserved = 1024, own = sizeof(RowSum) * kTileRows * kWindowWarps;  // per block
    const int64_t queries = held(width, x.warp_rows) ? 0 : x.warp_rows * x.row_warps * 2 * width,
                  stage = x.warps * group_bytes(width);
    for (int blocks = 2; x.stages < 2 && blocks > 0; --blocks)
      x.stages = static_cast<int>(((memory + reserved) / blocks - reserved - own - queries) / stage);
    if (x.stages > 3) x.stages = 3;
    x.shared_bytes = x.stages * stage + queries;
    return x;
  }

  // Elements per row in shared memory.
  static int tile_width(const WindowAttentionParams& p) { return p.window.d <= 128 && p.dv <= 128 ? 128 : 256; }
  // Whether a warp's queries fit in registers.
  KVOPS_HOST_DEVICE static constexpr bool held(int width, int rows) { return width * rows <= 128 * kTileRows; }
  // Bytes of a warp's keys and their values there.
  KVOPS_HOST_DEVICE static constexpr int group_bytes(int width) { return kGroupKeys * 2 * 2 * width; }
  // Groups of threads that divide the keys in the plain kernel: a thread has four channels.
  KVOPS_HOST_DEVICE static int plain_groups(int64_t dv) { return kWindowThreads / static_cast<int>(dv / 4); }
};

template <int kStages>
__device__ inline void wait_for_stage(int stages) {
  if (stages >= kStages)
    wait_for_copies<kStages - 1>();
  else if constexpr (kStages > 1)
    wait_for_stage<kStages - 1>(stages);
}

// ---- Rows in shared memory ----

// The position of a 16-byte piece. A row's pieces are permuted to avoid bank conflicts, both when eight lanes read four
// pieces of two rows (queries, keys) and when they read one piece of eight rows (values).
template <int kWidth>
__device__ inline int place_of(int row, int piece) {
  const int permutation = (row & 1) << 2 | (row & 2) | (row >> 2 & 1);
  return row * 2 * kWidth + (piece ^ permutation) * 16;
}

// The position of the piece `more` pieces after the one at `place`, if the numbers of the two have no bit in common and
// the first is below 8. The compiler computes it once for all groups.
__device__ inline int after(int place, int more) {
  return (place ^ more % 8 * 16) + more / 8 * 128;
}

// The part of a group that a lane copies: one column of 16 bytes, in every kStep-th row.
template <int kWidth>
struct Column {
  static constexpr int kColumns = kWidth / 8, kStep = 32 / kColumns;
  int row = threadIdx.x % 32 / kColumns, column = threadIdx.x % kColumns;

  // Starts copying the warp's rows; anything after the first `count` becomes 0.
  template <class T>
  __device__ void copy(char* to, const HeadRows& rows, int pieces, int count, bool wide) const {
    if (column >= pieces) return;
    if (wide && count >= kGroupKeys && rows.strided(0, kGroupKeys)) {
      const char* from = rows.row(0) + row * rows.stride_n + column * kPieceBytes<T>;
#pragma unroll
      for (int i = 0; i < kGroupKeys; i += kStep, from += kStep * rows.stride_n) begin<T>(at(to, i), from);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kGroupKeys; i += kStep) {
      const char* const from = rows.row(row + i, row + i < count) + column * kPieceBytes<T>;
      if (row + i >= count)
        *at(to, i) = uint4{};
      else if (wide)
        begin<T>(at(to, i), from);
      else
        *at(to, i) = load_raw<T, false>(from);
    }
  }

  // Converts the fp8 or int8 rows that this lane has copied, and that have arrived, to bf16.
  template <class T>
  __device__ void widen_rows(char* to, int pieces) const {
    if (column >= pieces) return;
#pragma unroll 1
    for (int i = 0; i < kGroupKeys; i += kStep) *at(to, i) = widen<T>(*at(to, i));
  }

  // Sets the column to 0 in all rows, if it is in [begin, end).
  __device__ void clear(char* to, int begin, int end) const {
    if (column < begin || column >= end) return;
#pragma unroll 1
    for (int i = 0; i < kGroupKeys; i += kStep) *at(to, i) = uint4{};
  }

 private:
  template <class T>
  __device__ static void begin(uint4* to, const char* from) {
    if constexpr (kPieceBytes<T> == 8)
      copy_async<8>(to, from, true);
    else
      copy_async(to, from);
  }
  __device__ uint4* at(char* to, int i) const {
    return reinterpret_cast<uint4*>(to + place_of<kWidth>(row + i, column));
  }
};

// Rotates the warp's keys, those of slots slot + [0, count), after arrive(), which waits for them. A lane takes two
// units that are rotated together, and reads the angles of kAhead such pairs before it needs the first.
template <class T, int kWidth, int kAhead, class Unit, class Arrive>
__device__ inline void turn_keys(const SlotRope& rope, int64_t b, int64_t slot, int count, char* keys,
                                 const Arrive& arrive) {
  using Pairs = Turn<T, Unit>;
  constexpr int kUnits = 16 / sizeof(Unit);  // per piece
  Pairs turns[kAhead];
  const RowUnits row = {0, static_cast<int>(rope.pairs) / Pairs::kPairs, rope.interleaved};
  const auto bits = [&](const AngleTable& x) {
    return reinterpret_cast<uintptr_t>(x.row(b, 0)) | static_cast<uintptr_t>(x.stride_n * sizeof(float));
  };
  const bool wide = Pairs::kPairs % 4 == 0 && (bits(rope.cos) | bits(rope.sin)) % 16 == 0;
  const auto read = [&](float (&to)[Pairs::kPairs], const float* from) {
    if (wide) {
#pragma unroll
      for (int i = 0; i < Pairs::kPairs / 4; ++i) {
        const float4 x = __ldg(reinterpret_cast<const float4*>(from) + i);
        to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Pairs::kPairs; ++i) to[i] = __ldg(from + i);
    }
  };
  // Calls fn(turn, key, lane) for the next kAhead of this lane's pairs of units, every 32nd of the group.
  struct Place {
    int key, lane;
  };
  const int own = threadIdx.x % 32, more_keys = 32 / row.turning, more_lanes = 32 - more_keys * row.turning;
  const auto for_turns = [&](Place& at, const auto& fn) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (at.key < min(count, kGroupKeys)) fn(turns[i], at.key, at.lane);
      at.lane += more_lanes;
      const bool next = at.lane >= row.turning;
      at = {at.key + more_keys + next, next ? at.lane - row.turning : at.lane};
    }
  };
  const auto read_turns = [&](Place& at) {
    for_turns(at, [&](Pairs& turn, int key, int lane) {
      read(turn.cos, rope.cos.row(b, slot + key) + lane * Pairs::kPairs);
      read(turn.sin, rope.sin.row(b, slot + key) + lane * Pairs::kPairs);
    });
  };
  Place here = {own / row.turning, own % row.turning}, ahead = here;
  read_turns(ahead);
  arrive();
  __syncwarp();  // the warp's own keys have arrived
#pragma unroll 1
  for (; here.key < min(count, kGroupKeys); read_turns(ahead))
    for_turns(here, [&](const Pairs& turn, int key, int lane) {
      const auto at = [&](int unit) -> Unit& {
        return reinterpret_cast<Unit*>(keys + place_of<kWidth>(key, unit / kUnits))[unit % kUnits];
      };
      const RowUnits::Two two = row.owned(lane);
      turn.apply(at(two.first), at(two.second), rope.interleaved);
    });
}

// ---- A warp's rows ----

// Packs two numbers into one register, the first in the low half.
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

// The running state of a warp's 8 or 16 rows, which are the columns of its products. Of each half t, lane l has rows
// 8 t + l % 4 * 2 + i (i = 0, 1): for keys l / 4 and l / 4 + 8 of a group, and for the same two of every 16 channels.
//
// kRounded: a row's sum is that of the weights as they are multiplied, rounded to 16 bits. Its output is then an exact
// mean of values with slightly different weights (drop_scores.cuh).
template <class T, int kWidth, int kRows, bool kRounded>
struct RowState {
  static constexpr int kBlocks = kWidth / 32;  // blocks of 64 bytes in a row of queries or keys
  static constexpr int kHalves = kRows / 8;
  static constexpr bool kHeld = AttentionPlan::held(kWidth, kRows);
  static constexpr int kAtOnce = kRows == 8 ? 4 : 1;  // values of 16 channels, loaded before they are multiplied
  static constexpr int kValues = kGroupKeys * 2 * kWidth, kGroupBytes = AttentionPlan::group_bytes(kWidth);
  uint4 held[kHeld ? kBlocks : 1][kHalves];
  const char* queries;                      // or the rows in shared memory
  float out[kWidth / 16][kHalves][4] = {};  // in the layout of the tensor cores
  float most[kHalves][2];                   // the maxima of the rows' logits; -FLT_MAX if there are none
  float sum[kHalves][2] = {};               // over the lane's own keys
  int limit[kHalves][2], least;             // the limits of the lane's rows, and the least of all rows
  int count;                                // rows from the lane's first one on
  float* logits;                            // where the logits of that row go, or null

  __device__ RowState() {
#pragma unroll
    for (int t = 0; t < kHalves; ++t) most[t][0] = most[t][1] = -FLT_MAX;
  }

  __device__ uint4 query(int block, int half) const {
    if constexpr (kHeld) return held[block][half];
    const int lane = threadIdx.x % 32;
    return *reinterpret_cast<const uint4*>(queries + place_of<kWidth>(lane / 4 + 8 * half, 4 * block + lane % 4));
  }

  // Calls fn(logit, key, half, i) for the lane's logits of kGroups groups.
  template <int kGroups, class Fn>
  __device__ static void for_logits(float (&x)[kGroups][kHalves][4], int key, const Fn& fn) {
    key += threadIdx.x % 32 / 4;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int t = 0; t < kHalves; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) fn(x[g][t][e], key + kGroupKeys * g + e / 2 * 8, t, e % 2);
  }

  // Raises the maxima to those of these logits, of which the ones that are not finite become -infinity.
  template <int kGroups>
  __device__ void raise(float (&x)[kGroups][kHalves][4]) {
    for_logits<kGroups>(x, 0, [&](float& logit, int, int, int) {
      if (!is_finite(logit)) logit = -CUDART_INF_F;
    });
#pragma unroll
    for (int t = 0; t < kHalves; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = most[t][i];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) top = fmaxf(top, fmaxf(x[g][t][i], x[g][t][2 + i]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kWarp, top, step));
        const float factor = exp2_fast(most[t][i] - top);
        most[t][i] = top;
        sum[t][i] *= factor;
#pragma unroll
        for (int c = 0; c < kWidth / 16; ++c) {
          out[c][t][i] *= factor;
          out[c][t][2 + i] *= factor;
        }
      }
  }

  // Processes kGroups groups of 16 keys, adjacent in shared memory, starting with key `key`. No row sees key `end`.
  template <int kGroups, class Terms>
  __device__ void step(const WindowAttentionParams& p, const Terms& terms, int key, int first, int end,
                       const char* group) {
    const Window& w = p.window;
    const int lane = threadIdx.x % 32, pieces = static_cast<int>(w.k.row_bytes / 16);
    float x[kGroups][kHalves][4] = {};
    terms.begin(x, key, end - key);
    const int keys_at = place_of<kWidth>(lane / 4, lane % 4);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      if (4 * block >= pieces) break;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint4 a[2], b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* const keys = group + after(keys_at, 4 * (block + i)) + g * kGroupBytes;
          a[i] = *reinterpret_cast<const uint4*>(keys);
          b[i] = *reinterpret_cast<const uint4*>(keys + 8 * 2 * kWidth);  // eight rows further
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int t = 0; t < kHalves; ++t) {
            const uint4 q = query(block + i, t);
            mma<Value<T>>(x[g][t], a[i].x, b[i].x, a[i].y, b[i].y, q.x, q.y);
            mma<Value<T>>(x[g][t], a[i].z, b[i].z, a[i].w, b[i].w, q.z, q.w);
          }
      }
    }
    terms.end(x, key, end - key);

    if (w.softcap == 0.0f) {
      const float scale = w.scale * kLog2e;
      for_logits<kGroups>(x, key, [&](float& logit, int, int, int) { logit = __fmul_rn(logit, scale); });
    } else {
      for_logits<kGroups>(x, key, [&](float& logit, int, int, int) { logit = logit_of(w, logit, kLog2e); });
    }
    const bool all_seen = first <= key && key <= least - kGroupKeys * kGroups;
    if (logits)
      for_logits<kGroups>(x, key, [&](float& logit, int j, int t, int i) {
        if (8 * t + i < count && j < w.n) logits[(8 * t + i) * w.n + j] = logit;  // nobody reads those of unseen keys
      });
    if (!all_seen)
      for_logits<kGroups>(x, key, [&](float& logit, int j, int t, int i) {
        if (j < first || j >= limit[t][i]) logit = -CUDART_INF_F;
      });
    bool rises = false;  // also for NaN
    for_logits<kGroups>(x, key, [&](float& logit, int, int t, int i) { rises |= !(logit <= most[t][i]); });
    if (__any_sync(kWarp, rises)) raise<kGroups>(x);

    unsigned weights[kGroups][kHalves][2];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int t = 0; t < kHalves; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float low = exp2_fast(x[g][t][2 * e] - most[t][0]), high = exp2_fast(x[g][t][2 * e + 1] - most[t][1]);
          if constexpr (kRounded) {
            low = to_float(from_float<Value<T>>(low));
            high = to_float(from_float<Value<T>>(high));
          }
          sum[t][0] += low;
          sum[t][1] += high;
          x[g][t][2 * e] = low, x[g][t][2 * e + 1] = high;
        }
    terms.weigh(x, key, end - key);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int t = 0; t < kHalves; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          weights[g][t][e] = transpose_matrix(pack<Value<T>>(x[g][t][2 * e], x[g][t][2 * e + 1]));
    const int dv = static_cast<int>(p.dv);
    const int values_at = place_of<kWidth>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    // What the last of the channels at once are if they are past dv does not matter.
#pragma unroll
    for (int c = 0; c < kWidth / 16; c += kAtOnce) {
      if (16 * c >= dv) break;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        unsigned v[kAtOnce][4];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          load_matrices<true>(v[i], group + after(values_at, 2 * (c + i)) + g * kGroupBytes + kValues);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
          for (int t = 0; t < kHalves; ++t)
            mma<Value<T>>(out[c + i][t], v[i][0], v[i][1], v[i][2], v[i][3], weights[g][t][0], weights[g][t][1]);
      }
    }
  }
};

__device__ inline void add_scaled(float4& x, const float4& y, float weight) {
  x.x = fmaf(y.x, weight, x.x);
  x.y = fmaf(y.y, weight, x.y);
  x.z = fmaf(y.z, weight, x.z);
  x.w = fmaf(y.w, weight, x.w);
}

template <class T, int kWidth, int kRows, bool kRounded, bool kTurns, bool kPaged>
__global__ void __launch_bounds__(kWindowThreads, 1)
    attention_parts_kernel(WindowAttentionParams p, AttentionPlan plan, float* parts, RowSum* sums, float* logits) {
  using State = RowState<T, kWidth, kRows, kRounded>;
  const Window& w = p.window;
  const int warps = blockDim.x / 32, row_warps = plan.row_warps, rows = kRows * row_warps;
  DYNAMIC_SHARED(char, ring);  // [stages, warps]: a group of keys, then their values
  char* const queries = ring + plan.stages * warps * State::kGroupBytes;  // [rows], unless registers hold them
  __shared__ RowSum warp_sums[kWindowWarps][kRows];

  // In 32 bits, since four divisions in 64 bits would take a block as long as a load from DRAM.
  const unsigned unit = blockIdx.x / plan.row_blocks, heads = static_cast<unsigned>(w.b * w.heads);
  const int64_t head = kTurns ? unit % heads : unit / plan.splits.count;
  const int64_t split = kTurns ? unit / heads : unit % plan.splits.count;
  const int64_t b = static_cast<unsigned>(head) / static_cast<unsigned>(w.heads), h = head - b * w.heads;
  const int all = static_cast<int>(w.group * w.w), first_row = blockIdx.x % plan.row_blocks * rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warp = warp % row_warps;
  const auto limit_of = [&](int row) { return static_cast<int>(w.limit(b, row % static_cast<int>(w.w))); };

  // The rows. What padding rows see does not matter.
  State state;
  const int warp_row = first_row + row_warp * kRows, row = warp_row + lane % 4 * 2;
  state.count = all - row;
  state.logits = logits ? logits + (head * all + row) * w.n : nullptr;
  state.least = static_cast<int>(w.n);
#pragma unroll
  for (int t = 0; t < State::kHalves; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.limit[t][i] = 8 * t + i < state.count ? limit_of(row + 8 * t + i) : static_cast<int>(w.n);
      state.least = min(state.least, state.limit[t][i]);
    }
  int most = 0;  // one past the last key that any row of the block sees
  for (int r = first_row + lane; r < min(first_row + rows, all); r += 32) most = max(most, limit_of(r));
  most = __reduce_max_sync(kWarp, most);
  state.least = __reduce_min_sync(kWarp, state.least);
  if constexpr (State::kHeld) {
#pragma unroll
    for (int block = 0; block < State::kBlocks; ++block)
#pragma unroll
      for (int t = 0; t < State::kHalves; ++t) {
        const int r = warp_row + 8 * t + lane / 4;
        state.held[block][t] = r < all ? query_piece<T>(w, b, h, r, 4 * block + lane % 4, plan.wide_queries) : uint4{};
      }
  } else {
    constexpr int kPieces = kWidth / 8;
    for (int i = threadIdx.x; i < rows * kPieces; i += blockDim.x) {
      const int r = i / kPieces, piece = i % kPieces;
      *reinterpret_cast<uint4*>(queries + place_of<kWidth>(r, piece)) =
          first_row + r < all ? query_piece<T>(w, b, h, first_row + r, piece, plan.wide_queries) : uint4{};
    }
    state.queries = queries + place_of<kWidth>(row_warp * kRows, 0);
    __syncthreads();  // the queries are written
  }

  // This split's keys, counted from the first valid slot, so that a padded row sums as it would alone. Each warp copies
  // one group of a tile. Warps with the same rows use their own groups, warps with the same keys each other's.
  const int first = static_cast<int>(w.first(b));
  const int begin = static_cast<int>(min(first + split * plan.splits.keys, w.n));
  const int end = static_cast<int>(min(begin + plan.splits.keys, int64_t{most}));
  const int tile_keys = kGroupKeys * warps, tiles = end > begin ? (end - begin - 1) / tile_keys + 1 : 0;
  const int k_pieces = static_cast<int>(w.k.row_bytes / 16), v_pieces = static_cast<int>(p.v.row_bytes / 16);
  const Column<kWidth> column;
  // Keys that were rotated beforehand are dense, even if the values are paged.
  const HeadRows all_keys = kPaged && !kTurns ? w.k.head(b, h) : head_rows<kPaged, T>(w.k, b, h);
  const HeadRows all_values = head_rows<kPaged, T>(p.v, b, h);
  const auto terms = [&] {
    if constexpr (kRounded || kTurns)
      return NoTerms{};
    else
      return KeyTerms<T, kPaged>{w, head};
  }();
  const auto group_at = [&](int stage, int group) { return ring + (stage * warps + group) * State::kGroupBytes; };
  for (int stage = 0; stage < plan.stages; ++stage)
    column.clear(group_at(stage, warp), k_pieces, (k_pieces + 7) / 8 * 8);
  const auto fetch = [&](int tile, int stage) {
    const int key = begin + tile * tile_keys + warp * kGroupKeys;
    char* const keys = group_at(stage, warp);
    column.template copy<T>(keys, all_keys.from(key), k_pieces, end - key, plan.wide);
    column.template copy<T>(keys + State::kValues, all_values.from(key), v_pieces, end - key, plan.wide);
  };
  const auto meet = [&] {
    if (row_warps > 1)
      __syncthreads();
    else
      __syncwarp();
  };
  const int own = warp / row_warps * row_warps;  // the first group of a tile for this warp's rows
  int from = 0, to = 0;                          // stages
#pragma unroll 1
  for (int tile = 1 - plan.stages; tile < tiles; ++tile) {
    if (tile + plan.stages - 1 < tiles) fetch(tile + plan.stages - 1, to);
    end_copies();
    to = to + 1 == plan.stages ? 0 : to + 1;
    if (tile < 0) continue;
    const auto arrive = [&] {
      wait_for_stage<3>(plan.stages);
      if constexpr (sizeof(T) == 1) {
        column.template widen_rows<T>(group_at(from, warp), k_pieces);
        column.template widen_rows<T>(group_at(from, warp) + State::kValues, v_pieces);
      }
    };
    if constexpr (kTurns) {
      constexpr int kAhead = 4096 / (kWidth * kRows);  // what the registers beside `state` allow
      const int mine = begin + tile * tile_keys + warp * kGroupKeys;
      if (w.rope.pairs % 8 == 0)
        turn_keys<Value<T>, kWidth, kAhead, uint4>(w.rope, b, mine, end - mine, group_at(from, warp), arrive);
      else
        turn_keys<Value<T>, kWidth, kAhead, unsigned short>(w.rope, b, mine, end - mine, group_at(from, warp), arrive);
    } else {
      arrive();
    }
    meet();  // the tile has arrived
    const int key = begin + tile * tile_keys + own * kGroupKeys;
    const char* const group = group_at(from, own);
    constexpr int kGroups = State::kHeld ? 2 : 1;  // what the registers allow
    if (row_warps == 1) {
      if (key < most) state.template step<1>(p, terms, key, first, most, group);
    } else {
#pragma unroll 1
      for (int i = 0; i < row_warps && key + i * kGroupKeys < most; i += kGroups)
        state.template step<kGroups>(p, terms, key + i * kGroupKeys, first, most, group + i * State::kGroupBytes);
    }
    meet();  // the tile may be overwritten
    from = from + 1 == plan.stages ? 0 : from + 1;
  }
  wait_for_copies<0>();

  // Combine the parts of warps with the same rows, in the order of the warps.
  __syncthreads();  // the ring may be overwritten
  const auto out_at = [&](int of, int r, int channel) {
    return reinterpret_cast<float*>(group_at(0, of)) + r * kWidth + (channel ^ (r >> 1 & 3) << 3);  // no bank conflicts
  };
#pragma unroll
  for (int t = 0; t < State::kHalves; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 8 * t + lane % 4 * 2 + i;
      float sum = state.sum[t][i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kWarp, sum, step);
      if (lane < 4) warp_sums[warp][r] = sum == 0.0f ? RowSum::none() : RowSum{state.most[t][i], sum};
#pragma unroll
      for (int c = 0; c < kWidth / 8; ++c) *out_at(warp, r, 8 * c + lane / 4) = state.out[c / 2][t][c % 2 * 2 + i];
    }
  __syncthreads();  // all warps' sums are written
  const int columns = static_cast<int>(p.dv) / 4;
  for (int i = threadIdx.x; i < min(rows, all - first_row) * columns; i += blockDim.x) {
    const int r = i / columns, c = i % columns;
    RowSum total = RowSum::none();
    for (int of = r / kRows; of < warps; of += row_warps) total.add(warp_sums[of][r % kRows]);
    const float less = total.most == -CUDART_INF_F ? 0.0f : total.most;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int of = r / kRows; of < warps; of += row_warps)
      add_scaled(out, *reinterpret_cast<const float4*>(out_at(of, r % kRows, 4 * c)),
                 exp2_fast(warp_sums[of][r % kRows].most - less));
    const int64_t at = (head * all + first_row + r) * plan.parts + split;
    if (c == 0) sums[at] = total;
    *reinterpret_cast<float4*>(parts + at * p.dv + 4 * c) = out;
  }
}

// Loads four elements.
template <class T>
__device__ inline float4 load_four(const char* p, bool wide) {
  const T* const x = reinterpret_cast<const T*>(p);
  if (sizeof(T) == 4 && wide) return __ldg(reinterpret_cast<const float4*>(p));
  return make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3]));
}

template <class T, bool kPaged>
__global__ void __launch_bounds__(kWindowThreads)
    plain_attention_parts_kernel(WindowAttentionParams p, AttentionPlan plan, const RowSum* totals, float* parts,
                                 RowSum* sums) {
  const Window& w = p.window;
  using Keys = KeyTile<T, 8>;
  DYNAMIC_SHARED(char, queries);                                                      // [16, pitch]
  float* const weights = reinterpret_cast<float*>(queries + kTileRows * plan.pitch);  // [kPlainKeys, 16]
  __shared__ int limits[kTileRows];
  __shared__ float less[kTileRows];

  const int64_t unit = blockIdx.x / plan.row_blocks, head = unit / plan.splits.count, split = unit % plan.splits.count;
  const int64_t b = head / w.heads, h = head % w.heads;
  const int all = static_cast<int>(w.group * w.w), first_row = blockIdx.x % plan.row_blocks * kTileRows;
  const RowLayout layout{1, all, all, all};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  load_queries<T>(w, layout, b, h, first_row, kTileRows, queries, plan.pitch, limits, plan.wide_queries);
  for (int i = threadIdx.x; i < kTileRows; i += kWindowThreads) {
    const float most = first_row + i < all ? totals[head * all + first_row + i].most : 0.0f;
    less[i] = most == -CUDART_INF_F ? 0.0f : most;
  }
  __syncthreads();  // queries, limits and subtrahends are written

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
    const KeyTerms<T, kPaged> terms{w, head};
    {
      Keys keys;
      const int own = key + warp * 16;
      const HeadRows rows =
          (kPaged ? w.k.head(b, h) : head_rows<false>(w.k, b, h)).from(own);  // dense if rotated beforehand
      const int pieces = static_cast<int>(w.k.row_bytes / 16);
      if (pieces <= 32) keys.load(rows, end - own, pieces, 0, plan.wide);
      Products<1> x;
      multiply_all<T, 8>(x, keys, w.k.row_bytes, rows, end - own, plan.wide, queries, plan.pitch, terms, own);
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = own + lane / 4 + e / 2 * 8, row = 8 * t + lane % 4 * 2 + e % 2;
          const float logit = logit_of(w, x[0][t][e], kLog2e);
          const bool counts = first <= j && j < limits[row] && fabsf(logit) < CUDART_INF_F;
          weights[(j - key) * kTileRows + row] = counts ? exp2_fast(fminf(logit - less[row], 0.0f)) : 0.0f;
        }
    }
    __syncthreads();  // the weights are written
    if (group < groups) {
      const int count = min(kPlainKeys, end - key);
#pragma unroll 1
      for (int j = group; j < count; j += groups) {
        float4 v = load_four<T>(head_rows<kPaged, T>(p.v, b, h).row(key + j) + column * 4 * sizeof(T), plan.wide);
        if constexpr (std::is_same_v<T, Int8>) {
          const float scale = terms.value_scale(key + j, true);
          v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
        }
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

// A block takes 32 channels of one row (y, x). Each warp adds up all of the row's sums. Groups of 8 threads take turns
// with the parts, four channels per thread.
template <class T>
__global__ void __launch_bounds__(kWindowThreads)
    attention_combine_kernel(WindowAttentionParams p, int parts, const float* part_outs, const RowSum* part_sums,
                             RowSum* totals) {
  const Window& w = p.window;
  const int64_t row = blockIdx.x;
  const unsigned query_head = blockIdx.x / static_cast<unsigned>(w.w) % static_cast<unsigned>(w.heads * w.group);
  const int lane = threadIdx.x % 32, channel = blockIdx.y * kCombined + lane % kCombiners * 4;
  const RowSum* const sums = part_sums + row * parts;
  RowSum total = RowSum::none();
  for (int i = lane; i < parts; i += 32) total.add(sums[i]);
#pragma unroll
  for (int step = 16; step; step /= 2)
    total.add({__shfl_xor_sync(kWarp, total.most, step), __shfl_xor_sync(kWarp, total.sum, step)});
  const bool empty = total.sum == 0.0f;
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    p.lse[row] = empty ? -CUDART_INF_F : (total.most + log2f(total.sum)) * kLn2;
    totals[row] = total;
  }
  const float less = empty ? 0.0f : total.most, factor = empty ? 0.0f : row_factor(w, total, query_head);
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (channel < p.dv) {
    const float* const outs = part_outs + row * parts * p.dv + channel;
#pragma unroll 4
    for (int i = threadIdx.x / kCombiners; i < parts; i += kWindowThreads / kCombiners)
      add_scaled(out, *reinterpret_cast<const float4*>(outs + i * p.dv), exp2_fast(sums[i].most - less));
  }
#pragma unroll
  for (int step = kCombiners; step < 32; step *= 2)
    add_scaled(out,
               {__shfl_xor_sync(kWarp, out.x, step), __shfl_xor_sync(kWarp, out.y, step),
                __shfl_xor_sync(kWarp, out.z, step), __shfl_xor_sync(kWarp, out.w, step)},
               1.0f);
  __shared__ float4 shares[kWindowWarps][kCombiners];
  if (lane < kCombiners) shares[threadIdx.x / 32][lane] = out;
  __syncthreads();
  if (threadIdx.x >= kCombiners || channel >= p.dv) return;
  for (int i = 1; i < kWindowWarps; ++i) add_scaled(out, shares[i][lane], 1.0f);
  T* const to = reinterpret_cast<T*>(p.out) + row * p.dv + channel;
  to[0] = from_float<T>(out.x * factor);
  to[1] = from_float<T>(out.y * factor);
  to[2] = from_float<T>(out.z * factor);
  to[3] = from_float<T>(out.w * factor);
}

// One thread per piece of K or V.
template <class T>
__global__ void __launch_bounds__(kWindowThreads)
    widen_rows_kernel(KVView from, KVView to, int64_t pieces_of_all, int64_t heads, int64_t n, bool wide) {
  const int64_t i = blockIdx.x * int64_t{kWindowThreads} + threadIdx.x, pieces = to.row_bytes / 16;
  if (i >= pieces_of_all) return;
  const int64_t piece = i % pieces, slot = i / pieces % n, head = i / pieces / n, b = head / heads, h = head % heads;
  const char* const row = head_rows<true, T>(from, b, h).row(slot) + piece * kPieceBytes<T>;
  *reinterpret_cast<uint4*>(to.row(b, h, slot) + 16 * piece) =
      wide ? load_piece<T, true>(row) : load_piece<T, false>(row);
}

// Copies the biases of `keys` keys in pages, [b, heads, n]. One thread per key.
__global__ void __launch_bounds__(kWindowThreads)
    dense_bias_kernel(KVView from, float* to, int64_t keys, int64_t heads, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{kWindowThreads} + threadIdx.x, head = i / n;
  if (i < keys) to[i] = *reinterpret_cast<const float*>(from.head(head / heads, head % heads).row(i % n));
}

// ---- The passes ----

// Converts fp8 K or V to dense bf16. Slots without a page get the contents of some page; no row sees them.
inline void widen_rows_cuda(const Window& w, const KVView& from, const KVView& to, cudaStream_t stream) {
  const int64_t pieces = w.b * w.heads * w.n * (to.row_bytes / 16);
  with_read_dtype(w.stored, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 1)
      launch<widen_rows_kernel<T>>(grid_of((pieces + kWindowThreads - 1) / kWindowThreads), kWindowThreads, 0, stream,
                                   from, to, pieces, w.heads, w.n, aligned_rows(from, w.b, w.heads, w.n));
  });
}

// Copies the biases of keys in pages to `to`, [b, heads, n], and returns a view of it.
inline KVView dense_bias_cuda(const Window& w, float* to, cudaStream_t stream) {
  const int64_t keys = w.b * w.heads * w.n;
  launch<dense_bias_kernel>(grid_of((keys + kWindowThreads - 1) / kWindowThreads), kWindowThreads, 0, stream,
                            w.key_bias, to, keys, w.heads, w.n);
  return {reinterpret_cast<char*>(to), 4 * w.heads * w.n, 4 * w.n, 4, 4};
}

// parts: [b, Hq, w, plan.parts, dv], each scaled by 2^-most of its sum. sums: [b, Hq, w, plan.parts]. logits: [b, Hq,
// n], for one row per query head, or null.
inline void attention_parts_cuda(const WindowAttentionParams& p, const AttentionPlan& plan, float* parts, RowSum* sums,
                                 float* logits, cudaStream_t stream) {
  if (!p.window.key_bias.data && sm90::window_pass(p.window, &p.v, plan.splits.count, plan.splits.keys,
                                                   reinterpret_cast<float2*>(sums), parts, logits, stream))
    return;
  const dim3 grid = grid_of(p.window.b * p.window.heads * plan.splits.count * plan.row_blocks);
  const auto run = [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int kWidth = decltype(width)::value;
    const auto start = [&](auto rows, auto turns) {
      constexpr int kRows = decltype(rows)::value;
      with_pages<T>(p.v, [&](auto paged) {
        launch<attention_parts_kernel<T, kWidth, kRows, false, turns, paged>>(grid, 32 * plan.warps, plan.shared_bytes,
                                                                              stream, p, plan, parts, sums, logits);
      });
    };
    const auto with_rows = [&](auto rows) {
      if constexpr (!std::is_same_v<T, Int8>)
        if (plan.turns) return start(rows, std::true_type{});
      start(rows, std::false_type{});
    };
    plan.warp_rows == 8 ? with_rows(Constant<8>{}) : with_rows(Constant<16>{});
  };
  with_scaled_dtype(p.window.stored, [&](auto type) {
    if constexpr (sizeof(type) < 4) {
      if (AttentionPlan::tile_width(p) == 128)
        run(type, Constant<128>{});
      else
        run(type, Constant<256>{});
    }
  });
}

// The same with sums of rounded weights, by a plan of 16 rows per warp, to have fewer kernels.
inline void rounded_parts_cuda(const WindowAttentionParams& p, const AttentionPlan& plan, float* parts, RowSum* sums,
                               cudaStream_t stream) {
  const dim3 grid = grid_of(p.window.b * p.window.heads * plan.splits.count * plan.row_blocks);
  const auto run = [&](auto type, auto width) {
    using T = decltype(type);
    with_pages<T>(p.v, [&](auto paged) {
      launch<attention_parts_kernel<T, decltype(width)::value, kTileRows, true, false, paged>>(
          grid, 32 * plan.warps, plan.shared_bytes, stream, p, plan, parts, sums, nullptr);
    });
  };
  with_read_dtype(p.window.stored, [&](auto type) {
    if constexpr (sizeof(type) < 4)
      AttentionPlan::tile_width(p) == 128 ? run(type, Constant<128>{}) : run(type, Constant<256>{});
  });
}

// The same for every dtype and width. totals: [b, Hq, w].
inline void plain_attention_parts_cuda(const WindowAttentionParams& p, const AttentionPlan& plan, const RowSum* totals,
                                       float* parts, RowSum* sums, cudaStream_t stream) {
  with_scaled_dtype(p.window.stored, [&](auto type) {
    with_pages<decltype(type)>(p.v, [&](auto paged) {
      launch<plain_attention_parts_kernel<decltype(type), paged>>(
          grid_of(p.window.b * p.window.heads * plan.splits.count * plan.row_blocks), kWindowThreads, plan.shared_bytes,
          stream, p, plan, totals, parts, sums);
    });
  });
}

// Combines all parts to out, of dtype `to`, and lse, and to the rows' totals, [b, Hq, w].
inline void attention_combine_cuda(const WindowAttentionParams& p, const AttentionPlan& plan, DType to,
                                   const float* parts, const RowSum* sums, RowSum* totals, cudaStream_t stream) {
  with_dtype(to, [&](auto type) {
    const dim3 grid = grid_of(p.window.b * p.window.heads * p.window.group * p.window.w,
                              static_cast<unsigned>((p.dv + kCombined - 1) / kCombined));
    launch<attention_combine_kernel<decltype(type)>>(grid, kWindowThreads, 0, stream, p, plan.parts, parts, sums,
                                                     totals);
  });
}

}  // namespace
}  // namespace kvops
