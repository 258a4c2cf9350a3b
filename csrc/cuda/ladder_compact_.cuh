// What the ladder keeps of each layer, moved to the front in place; keys turn on the way if they are to.
//
// Bytes that must move: each row that moves read once, written once; no extra memory, no index tensor. A slot's row
// comes from that slot or behind it, so a chain (a head of K or V of a layer) can be walked forward as compact_kv_
// does: all rows of a tile are in registers before the first is written (the barrier), and while a tile is written, the
// next one's rows are on their way. What those move is worked out two tiles ahead (ladder.cuh). Slots before the plan's
// first ladder are never looked at.
//
// Parallel are layers, batch, heads, K and V, and column slices of a row, narrower ones until there are two blocks for
// each multiprocessor: 32 layers of 8 heads of 256 bytes are 512 blocks of whole rows, a single layer 64 of 64 bytes.
//
// Grid: x runs over (layer, batch, head, slice), y over K and V. Not yet measured on a GPU.
#pragma once
#include "../ops/ladder_compact_.h"
#include "ladder.cuh"

namespace kvops {
namespace {

template <class T, class Unit>
__global__ void __launch_bounds__(kMoveThreads)
    ladder_compact_kernel(const __grid_constant__ LadderBatch p, int lanes_log2, unsigned slices) {
  const RowUnits row = ladder_row<T, Unit>(p, blockIdx.y);
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes, rows = step * kLadderRows;
  const int slice = static_cast<int>(blockIdx.x % slices) * lanes, lane = slice + threadIdx.x % lanes;
  if (slice >= row.lanes()) return;  // the other tensor's rows are wider
  const LadderChain chain(p, blockIdx.x / slices, blockIdx.y);
  const RowUnits::Two mine = row.owned(lane);
  const bool has_first = lane < row.lanes(), has_second = has_first && mine.second < row.units;
  LadderTurn<T, Unit> turn;
  if constexpr (!std::is_void_v<T>) {
    if (lane < row.turning) turn.of(p.rope.inv_freq + lane * turn.kPairs);
  }

  struct Tile {
    Unit first[kLadderRows], second[kLadderRows];
    int32_t shift[kLadderRows];  // 0: the row stays
  };
  const auto at = [&](uint32_t slot) { return reinterpret_cast<Unit*>(chain.out + slot * chain.out_stride); };
  const auto fetch = [&](uint32_t start, const int32_t* shifts) {
    Tile tile;
#pragma unroll
    for (int u = 0; u < kLadderRows; ++u) {
      const int i = threadIdx.x / lanes + u * step, shift = has_first ? shifts[i] : 0;
      const Unit* const from = at(start + i + shift);
      tile.shift[u] = shift;
      tile.first[u] = shift ? from[mine.first] : Unit{};
      tile.second[u] = shift && has_second ? from[mine.second] : Unit{};
    }
    return tile;
  };

  __shared__ int32_t shifts[2][kLadderTile];
  const uint32_t kept = p.moves.kept;
  uint32_t start = p.moves.first;
  const auto plan = [&](int ahead, int32_t* shifts) {
    ladder_shifts(p.moves, chain.offset, start + ahead * rows, rows, shifts);
  };
  plan(0, shifts[0]);
  plan(1, shifts[1]);
  __syncthreads();
  Tile tile = fetch(start, shifts[0]);
  __syncthreads();
  plan(2, shifts[0]);
  for (int other = 1; start < kept; start += rows, other ^= 1) {
    const Tile next = fetch(start + rows, shifts[other]);
    __syncthreads();  // the whole tile has been read, and the next one's shifts
    plan(3, shifts[other]);
#pragma unroll
    for (int u = 0; u < kLadderRows; ++u) {
      if (!tile.shift[u]) continue;
      if constexpr (!std::is_void_v<T>) {
        if (lane < row.turning) {
          turn.by(tile.shift[u]);
          turn.turn.apply(tile.first[u], tile.second[u], row.interleaved);
        }
      }
      Unit* const to = at(start + threadIdx.x / lanes + u * step);
      to[mine.first] = tile.first[u];
      if (has_second) to[mine.second] = tile.second[u];
    }
    tile = next;
  }
}

inline void ladder_compact__cuda(const LadderParams& p, cudaStream_t stream) {
  const int64_t chains = p.b * p.heads;
  if (chains * (p.moves.kept - p.moves.first) == 0) return;
  for_ladder_batches(p, [&](const LadderBatch& batch, int64_t layers, uint64_t bits) {
    with_ladder_types(p, bits, [&]<class T, class Unit>(LadderTypes<T, Unit>) {
      const Slices slices = column_slices(ladder_lanes<Unit>(batch), sizeof(Unit), 2 * layers * chains);
      launch<ladder_compact_kernel<T, Unit>>(grid_of(layers * chains * slices.count, 2), kMoveThreads, 0, stream, batch,
                                             slices.lanes_log2, static_cast<unsigned>(slices.count));
    });
  });
}

}  // namespace
}  // namespace kvops
