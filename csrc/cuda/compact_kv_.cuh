// The kept rows of K and V moved to the front, in place.
//
// Bytes that must move: each kept row read once, written once; no extra memory. Kept slots ascend, so slot i receives a
// row from index[i] >= i. A block owns a column slice of one head of K or V and walks its tiles of slots forward: all
// rows of a tile are in registers before the first is written (the barrier), and what later tiles read lies behind
// every slot that has been written (index[j] >= j). So while a tile is written, the next one's rows and the indices of
// the one after that are already on their way.
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

constexpr int64_t kSkip = -2;  // not an index

template <class Unit>
__global__ void __launch_bounds__(kMoveThreads) compact_kv_kernel(CompactKVParams p, int lanes_log2, unsigned slices) {
  const KVView x = blockIdx.y ? p.v : p.k;
  const unsigned heads = static_cast<unsigned>(p.heads), b = blockIdx.x / slices / heads,
                 h = blockIdx.x / slices % heads;
  const int64_t m = p.indices.m;
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes;
  const int64_t begin = static_cast<int64_t>(blockIdx.x % slices) * lanes * sizeof(Unit);  // of the slice, in bytes
  if (begin >= x.row_bytes) return;  // the other tensor's rows are wider
  const int64_t column = begin + threadIdx.x % lanes * sizeof(Unit);
  const bool inside = column < x.row_bytes;
  const int64_t* const index = p.indices.data + b * p.indices.stride_b + h * p.indices.stride_h;
  char* const data = x.row(b, h, 0) + column;

  // Tiles come in two steps, index and rows, neither with branches, so that no load waits for another.
  struct Indices {
    int64_t here[kAhead], before[kAhead];
  };
  const auto fetch_indices = [&](int64_t first) {
    Indices indices;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t i = first + u * step;
      indices.here[u] = inside && i < m ? index[i * p.indices.stride_m] : kSkip;
      indices.before[u] = inside && 0 < i && i < m ? index[(i - 1) * p.indices.stride_m] : kSkip;
    }
    return indices;
  };
  struct Tile {
    Unit rows[kAhead];
    unsigned moves;  // bit u: rows[u] is to be written
  };
  const auto fetch_rows = [&](int64_t first, const Indices& indices) {
    Tile tile = {};
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t from = indices.here[u];
      const bool moves = from > indices.before[u] && from > first + u * step && from < p.n;
      tile.moves |= static_cast<unsigned>(moves || from == -1) << u;
      tile.rows[u] = moves ? *reinterpret_cast<const Unit*>(data + from * x.stride_n) : Unit{};
    }
    return tile;
  };

  const int64_t stride = step * kAhead, mine = threadIdx.x / lanes;
  Tile tile = fetch_rows(mine, fetch_indices(mine));
  Indices indices = fetch_indices(mine + stride);
  for (int64_t first = mine; first - mine < m; first += stride) {
    const Tile next = fetch_rows(first + stride, indices);
    indices = fetch_indices(first + 2 * stride);
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
    const Slices slices = column_slices(units, sizeof(Unit), 2 * rows);
    launch<compact_kv_kernel<Unit>>(grid_of(rows * slices.count, 2), kMoveThreads, 0, stream, p, slices.lanes_log2,
                                    static_cast<unsigned>(slices.count));
  });
}

}  // namespace
}  // namespace kvops
