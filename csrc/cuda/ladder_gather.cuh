// Gathers the slots that the ladder keeps in each layer into other memory, and optionally rotates the keys.
//
// Bytes that must move: each kept row read once and written once; no index tensor. Sources and rotations are those of
// ladder_compact_; since no source is overwritten, every tile of slots is an independent block.
//
// Grid: x runs over (layer, batch, head, tile of slots), y over K and V.
#pragma once
#include "../ops/ladder_gather.h"
#include "ladder.cuh"

namespace kvops {
namespace {

template <class T, class Unit>
__global__ void __launch_bounds__(kMoveThreads)
    ladder_gather_kernel(const __grid_constant__ LadderBatch p, int lanes_log2, unsigned tiles) {
  const RowUnits row = ladder_row<T, Unit>(p, blockIdx.y);
  const LadderChain chain(p, blockIdx.x / tiles, blockIdx.y);
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes, rows = step * kLadderRows;
  const uint32_t start = blockIdx.x % tiles * rows, kept = p.moves.kept;
  __shared__ int32_t shifts[kLadderTile];
  ladder_shifts(p.moves, chain.offset, start, rows, shifts);
  __syncthreads();

  for (int lane = threadIdx.x % lanes; lane < row.lanes(); lane += lanes) {
    const RowUnits::Two mine = row.owned(lane);
    const bool has_second = mine.second < row.units;
    LadderTurn<T, Unit> turn;
    if constexpr (!std::is_void_v<T>) {
      if (lane < row.turning) turn.of(p.rope.inv_freq + lane * turn.kPairs);
    }
    // All loads come before the stores, which might alias them for all the compiler knows.
    Unit first[kLadderRows], second[kLadderRows];
#pragma unroll
    for (int u = 0; u < kLadderRows; ++u) {
      const int i = threadIdx.x / lanes + u * step;
      const Unit* const from = reinterpret_cast<const Unit*>(chain.in + (start + i + shifts[i]) * chain.in_stride);
      first[u] = start + i < kept ? from[mine.first] : Unit{};
      second[u] = start + i < kept && has_second ? from[mine.second] : Unit{};
    }
#pragma unroll
    for (int u = 0; u < kLadderRows; ++u) {
      const int i = threadIdx.x / lanes + u * step;
      if (start + i >= kept) continue;
      if constexpr (!std::is_void_v<T>) {
        if (lane < row.turning && shifts[i]) {
          turn.by(shifts[i]);
          turn.turn.apply(first[u], second[u], row.interleaved);
        }
      }
      Unit* const to = reinterpret_cast<Unit*>(chain.out + (start + i) * chain.out_stride);
      to[mine.first] = first[u];
      if (has_second) to[mine.second] = second[u];
    }
  }
}

inline void ladder_gather_cuda(const LadderParams& p, cudaStream_t stream) {
  const int64_t chains = p.b * p.heads;
  if (chains * p.moves.kept == 0) return;
  for_ladder_batches(p, [&](const LadderBatch& batch, int64_t layers, uint64_t bits) {
    with_ladder_types(p, bits, [&]<class T, class Unit>(LadderTypes<T, Unit>) {
      const int lanes_log2 = shared_lanes_log2(ladder_lanes<Unit>(batch));
      const int64_t tile = (kMoveThreads >> lanes_log2) * kLadderRows, tiles = (p.moves.kept + tile - 1) / tile;
      launch<ladder_gather_kernel<T, Unit>>(grid_of(layers * chains * tiles, 2), kMoveThreads, 0, stream, batch,
                                            lanes_log2, static_cast<unsigned>(tiles));
    });
  });
}

}  // namespace
}  // namespace kvops
