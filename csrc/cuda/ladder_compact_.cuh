// Moves the slots that the ladder keeps in each layer to the front, in place, and optionally rotates the keys.
//
// Bytes that must move: each row that moves read once and written once; no index tensor. A slot's row comes from that
// slot or a later one, so in_place.cuh lets many blocks share a head of a layer. A block has a chunk of 32 KiB: it
// computes the sources of its rows (ladder.cuh), reads them into registers, and writes them once the rows there have
// been read. Slots before the plan's first ladder are never accessed.
//
// Grid: x runs over (chunk, layer, batch, head, K or V, slice), in ticket order.
#pragma once
#include "../ops/ladder_compact_.h"
#include "in_place.cuh"
#include "ladder.cuh"

namespace kvops {
namespace {

constexpr int kCompactRows = kInPlaceUnits / 2;  // per lane: two units each

template <class T, class Unit>
__global__ void __launch_bounds__(kMoveThreads)
    ladder_compact_kernel(const __grid_constant__ LadderBatch p, InPlacePlan chunks, InPlaceMemory memory,
                          int lanes_log2, unsigned slices) {
  __shared__ int32_t shifts[kMoveThreads * kCompactRows];
  const InPlaceChunk block(chunks, memory);
  const unsigned values = block.chain / slices & 1;
  const RowUnits row = ladder_row<T, Unit>(p, values);
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes;
  const int slice = static_cast<int>(block.chain % slices) * lanes, lane = slice + threadIdx.x % lanes;
  if (slice >= row.lanes()) return;  // the other tensor's rows are wider
  const LadderChain chain(p, block.chain / slices / 2, values);
  const RowUnits::Two mine = row.owned(lane);
  const bool has_first = lane < row.lanes(), has_second = has_first && mine.second < row.units;
  const uint32_t start = p.moves.first + block.chunk * chunks.rows;
  ladder_shifts(p.moves, chain.offset, start, chunks.rows, shifts);
  __syncthreads();  // the shifts are written

  const auto at = [&](uint32_t slot) { return reinterpret_cast<Unit*>(chain.out + slot * chain.out_stride); };
  Unit first[kCompactRows], second[kCompactRows];
  int32_t shift[kCompactRows];  // 0: the row does not move
#pragma unroll
  for (int u = 0; u < kCompactRows; ++u) {
    const int i = threadIdx.x / lanes + u * step;
    shift[u] = has_first ? shifts[i] : 0;
    const Unit* const from = at(start + i + shift[u]);
    first[u] = shift[u] ? from[mine.first] : Unit{};
    second[u] = shift[u] && has_second ? from[mine.second] : Unit{};
  }
  if constexpr (!std::is_void_v<T>) {
    if (lane < row.turning) {
      LadderTurn<T, Unit> turn;
      turn.of(p.rope.inv_freq + lane * turn.kPairs);
#pragma unroll
      for (int u = 0; u < kCompactRows; ++u) {
        if (!shift[u]) continue;
        turn.by(shift[u]);
        turn.turn.apply(first[u], second[u], row.interleaved);
      }
    }
  }
  unsigned read = 0;
#pragma unroll
  for (int u = 0; u < kCompactRows; ++u) read ^= some_bits(first[u]) ^ some_bits(second[u]);
  block.wait_for_reads(read, [&](unsigned slot) {
    int32_t run;
    return static_cast<uint32_t>(p.moves.source(p.moves.first + slot, chain.offset, run)) >= start;
  });
#pragma unroll
  for (int u = 0; u < kCompactRows; ++u) {
    if (!shift[u]) continue;
    Unit* const to = at(start + threadIdx.x / lanes + u * step);
    to[mine.first] = first[u];
    if (has_second) to[mine.second] = second[u];
  }
}

// Calls fn(LadderTypes<T, Unit>{}, batch, chunks, lanes_log2, slices) for each launch of the call.
template <class Fn>
inline void for_ladder_compactions(const LadderParams& p, const Fn& fn) {
  const int64_t slots = p.moves.kept - p.moves.first;
  if (p.b * p.heads * slots == 0) return;
  for_ladder_batches(p, [&](const LadderBatch& batch, int64_t layers, uint64_t bits) {
    with_ladder_types(p, bits, [&]<class T, class Unit>(LadderTypes<T, Unit> types) {
      const int64_t lanes = ladder_lanes<Unit>(batch);
      const int lanes_log2 = shared_lanes_log2(lanes), rows = (kMoveThreads >> lanes_log2) * kCompactRows;
      const int64_t slices = ((lanes - 1) >> lanes_log2) + 1;
      fn(types, batch, InPlacePlan::of(slots, 2 * layers * p.b * p.heads * slices, rows), lanes_log2,
         static_cast<unsigned>(slices));
    });
  });
}

// For all launches, one after the other.
inline int64_t ladder_compact__workspace(const LadderParams& p) {
  Sections sections;
  for_ladder_compactions(
      p, [&](auto, const LadderBatch&, const InPlacePlan& chunks, int, unsigned) { InPlaceMemory(chunks, sections); });
  return sections.bytes;
}

inline void ladder_compact__cuda(const LadderParams& p, void* workspace, cudaStream_t stream) {
  if (const int64_t bytes = ladder_compact__workspace(p)) zero_async(workspace, bytes, stream);
  Sections sections{workspace};
  for_ladder_compactions(p, [&]<class T, class Unit>(LadderTypes<T, Unit>, const LadderBatch& batch,
                                                     const InPlacePlan& chunks, int lanes_log2, unsigned slices) {
    const InPlaceMemory memory(chunks, sections);
    launch<ladder_compact_kernel<T, Unit>>(grid_of(chunks.chains * chunks.count), kMoveThreads, 0, stream, batch,
                                           chunks, memory, lanes_log2, slices);
  });
}

}  // namespace
}  // namespace kvops
