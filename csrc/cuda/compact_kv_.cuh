// The kept rows of K and V moved to the front, in place.
//
// Bytes that must move: each kept row read once, written once; no extra memory. Kept slots ascend, so slot i receives a
// row from index[i] >= i. A block owns a column slice of one head of K or V and walks its tiles of slots forward: all
// rows of a tile are in registers before the first is written (the barrier), and what later tiles read lies behind
// every slot that has been written (index[j] >= j). So the next tile is fetched while the last is on its way out.
//
// Rows of a head are one chain, hence one block's; parallel are K and V, heads, batch, and column slices of a row.
// Slices get narrower, down to a 32-byte sector, until there are two blocks for each multiprocessor. A single layer of
// 8 heads of 256 bytes is 128 blocks. Not yet measured on a GPU.
//
// Grid: x runs over (batch, head, slice), y over K and V. Indices are not looked at on the host: -1 gives zeros; an
// entry outside [-1, n), or not above the one before it, or below its own slot, is skipped and its slot left as it is.
#pragma once
#include "../ops/compact_kv_.h"
#include "move.cuh"

namespace kvops {
namespace {

constexpr int kSector = 32;  // bytes that memory fetches at once

template <class Unit>
__global__ void __launch_bounds__(kMoveThreads) compact_kv_kernel(CompactKVParams p, int lanes_log2, int slices) {
  const KVView x = blockIdx.y ? p.v : p.k;
  const int64_t row = blockIdx.x / slices, b = row / p.heads, h = row % p.heads, m = p.indices.m;
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes;
  const int64_t begin = static_cast<int64_t>(blockIdx.x % slices) * lanes * sizeof(Unit);  // of the slice, in bytes
  if (begin >= x.row_bytes) return;  // the other tensor's rows are wider
  const int64_t column = begin + threadIdx.x % lanes * sizeof(Unit);
  const bool inside = column < x.row_bytes;
  const int64_t* const index = p.indices.data + b * p.indices.stride_b + h * p.indices.stride_h;
  char* const data = x.row(b, h, 0) + column;

  struct Tile {
    Unit rows[kAhead];
    unsigned moves;  // bit u: rows[u] is to be written
  };
  const auto fetch = [&](int64_t first) {
    Tile tile = {};
    int64_t source[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t i = first + u * step;
      source[u] = i;  // stays
      if (!inside || i >= m) continue;
      const int64_t from = index[i * p.indices.stride_m];
      const bool ascends = i == 0 || from > index[(i - 1) * p.indices.stride_m];
      if (from == -1 || (ascends && from > i && from < p.n)) source[u] = from;
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (source[u] == first + u * step) continue;
      tile.moves |= 1u << u;
      if (source[u] >= 0) tile.rows[u] = *reinterpret_cast<const Unit*>(data + source[u] * x.stride_n);
    }
    return tile;
  };

  const int64_t stride = step * kAhead, mine = threadIdx.x / lanes;
  Tile tile = fetch(mine);
  for (int64_t first = mine; first - mine < m; first += stride) {
    const Tile next = fetch(first + stride);
    __syncthreads();  // the whole tile has been read
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (tile.moves >> u & 1) *reinterpret_cast<Unit*>(data + (first + u * step) * x.stride_n) = tile.rows[u];
    tile = next;
  }
}

inline void compact_kv__cuda(const CompactKVParams& p, cudaStream_t stream) {
  const int64_t rows = p.b * p.heads;
  if (rows * p.indices.m == 0) return;
  const uint64_t bits = address_bits(p.k, p.b, p.heads, p.n) | address_bits(p.v, p.b, p.heads, p.n);
  with_unit(bits, [&](auto unit) {
    using Unit = decltype(unit);
    const int64_t units = (p.k.row_bytes > p.v.row_bytes ? p.k.row_bytes : p.v.row_bytes) / sizeof(Unit);
    int lanes_log2 = shared_lanes_log2(units);
    const auto slices = [&] { return (units + (int64_t{1} << lanes_log2) - 1) >> lanes_log2; };
    while (2 * rows * slices() < 2 * multiprocessors() && (sizeof(Unit) << lanes_log2) > kSector) --lanes_log2;
    launch<compact_kv_kernel<Unit>>(grid_of(rows * slices(), 2), kMoveThreads, 0, stream, p, lanes_log2,
                                    static_cast<int>(slices()));
  });
}

}  // namespace
}  // namespace kvops
