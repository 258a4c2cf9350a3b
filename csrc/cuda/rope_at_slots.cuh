// RoPE for keys that are cached without positions, rotated as they are read: each slot's pairs by that slot's angles.
//
// Bytes that must move: k read once and written once; the cos and sin tables, which all heads share, once. A lane owns
// two units of a slot that are rotated together (rope.cuh). It keeps their cosines and sines in registers and loops
// over the heads, with kRopeHeads of them in flight. Heads are divided over blocks such that there are at least two
// blocks per multiprocessor. The lane that writes a row has read it first, so the result may be k itself.
//
// Grid: x runs over (batch, tile of slots, group of heads).
#pragma once
#include "../ops/rope_at_slots.h"
#include "move.cuh"
#include "rope.cuh"

namespace kvops {
namespace {

constexpr int kRopeHeads = kAhead / 2;  // two units each

template <class T, class Unit, bool kPaged>
__global__ void __launch_bounds__(kMoveThreads)
    rope_at_slots_kernel(RopeAtSlotsParams p, int lanes_log2, unsigned tiles, unsigned groups, int64_t group) {
  const RowUnits row = {static_cast<int>(p.k.row_bytes / sizeof(Unit)),
                        static_cast<int>(p.rope.pairs * sizeof(T) / sizeof(Unit)), p.rope.interleaved};
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes;
  const unsigned tile = blockIdx.x / groups;
  const int64_t b = tile / tiles, slot = static_cast<int64_t>(tile % tiles) * step + threadIdx.x / lanes;
  const int64_t begin = blockIdx.x % groups * group, end = begin + group < p.heads ? begin + group : p.heads;
  if (slot >= p.n) return;

  for (int lane = threadIdx.x % lanes; lane < row.lanes(); lane += lanes) {
    const RowUnits::Two mine = row.owned(lane);
    const bool has_second = mine.second < row.units, turns = lane < row.turning;
    Turn<T, Unit> turn;
#pragma unroll
    for (int i = 0; i < turn.kPairs; ++i) {
      const int pair = lane * turn.kPairs + i;
      turn.cos[i] = turns ? p.rope.cos.row(b, slot)[pair] : 1.0f;
      turn.sin[i] = turns ? p.rope.sin.row(b, slot)[pair] : 0.0f;
    }
    for (int64_t h = begin; h < end; h += kRopeHeads) {
      Unit first[kRopeHeads], second[kRopeHeads];
#pragma unroll
      for (int u = 0; u < kRopeHeads; ++u) {
        const char* const key = kPaged ? head_rows<true>(p.k, b, h + u).row(slot) : p.k.row(b, h + u, slot);
        const Unit* const from = reinterpret_cast<const Unit*>(key);
        first[u] = h + u < end ? from[mine.first] : Unit{};
        second[u] = h + u < end && has_second ? from[mine.second] : Unit{};
      }
#pragma unroll
      for (int u = 0; u < kRopeHeads; ++u) {
        if (h + u >= end) continue;
        if (turns) turn.apply(first[u], second[u], row.interleaved);
        Unit* const to = reinterpret_cast<Unit*>(p.out.row(b, h + u, slot));
        to[mine.first] = first[u];
        if (has_second) to[mine.second] = second[u];
      }
    }
  }
}

inline void rope_at_slots_cuda(const RopeAtSlotsParams& p, cudaStream_t stream) {
  if (p.b * p.heads * p.n == 0) return;
  const uint64_t bits = address_bits(p.k, p.b, p.heads, p.n) | address_bits(p.out, p.b, p.heads, p.n);
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_turning_unit<T>(bits | static_cast<uint64_t>(p.rope.pairs) * sizeof(T), [&](auto unit) {
      using Unit = decltype(unit);
      const int lanes_log2 = shared_lanes_log2((p.k.row_bytes / sizeof(Unit) + 1) / 2);
      const int64_t step = kMoveThreads >> lanes_log2, tiles = (p.n + step - 1) / step;
      int64_t group = p.heads;
      const auto groups = [&] { return (p.heads + group - 1) / group; };
      while (group > 1 && p.b * tiles * groups() < 2 * multiprocessors()) group = (group + 1) / 2;
      with_pages(p.k, [&](auto paged) {
        launch<rope_at_slots_kernel<T, Unit, paged>>(grid_of(p.b * tiles * groups()), kMoveThreads, 0, stream, p,
                                                     lanes_log2, static_cast<unsigned>(tiles),
                                                     static_cast<unsigned>(groups()), group);
      });
    });
  });
}

}  // namespace
}  // namespace kvops
