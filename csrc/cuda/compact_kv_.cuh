// The kept rows of K and V moved to the front, in place.
//
// Bytes that must move: each kept row read once, written once. Kept slots ascend, so slot i receives a row from
// index[i] >= i, and in_place.cuh lets many blocks share a head: chunks of 32 KiB, read into registers, written when
// all chunks before have been read. A single layer of 8 heads that keeps 32768 rows of 256 bytes is 4096 blocks; four
// of them at least are on a multiprocessor, 128 KiB under way, where the memory of an H200 takes about 30. Rows of more
// than 512 bytes are cut into column slices, each a chain of its own. Not yet measured on a GPU.
//
// Grid: x runs over (chunk, K or V, batch, head, slice), in the order of tickets. Indices are not looked at on the
// host: -1 gives zeros; an entry outside [-1, n), or not above the one before it, or below its own slot, is skipped and
// its slot left as it is. So it is with pages if one of the two does not exist, and if the entry is -1.
#pragma once
#include "../ops/compact_kv_.h"
#include "in_place.cuh"

namespace kvops {
namespace {

constexpr int64_t kSkip = -2;  // not an index

template <class Unit, bool kPaged>
__global__ void __launch_bounds__(kMoveThreads, kPaged ? 3 : 4)  // the look-ups take registers
    compact_kv_kernel(CompactKVParams p, InPlacePlan chunks, InPlaceMemory memory, int lanes_log2, unsigned slices) {
  const InPlaceChunk block(chunks, memory);
  const unsigned heads = static_cast<unsigned>(p.heads), slice = block.chain % slices, h = block.chain / slices % heads,
                 tensor_row = block.chain / slices / heads, b = tensor_row >> 1;
  const KVView x = tensor_row & 1 ? p.v : p.k;
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes;
  const int64_t begin = static_cast<int64_t>(slice) * lanes * sizeof(Unit);  // of the slice, in bytes
  if (begin >= x.row_bytes) return;                                          // the other tensor's rows are wider
  const int64_t column = begin + threadIdx.x % lanes * sizeof(Unit), m = p.indices.m;
  const bool inside = column < x.row_bytes;
  const int64_t* const index = p.indices.data + b * p.indices.stride_b + h * p.indices.stride_h;
  HeadRows data = head_rows<kPaged>(x, b, h);
  data.data += column;
  const int64_t first = static_cast<int64_t>(block.chunk) * chunks.rows + threadIdx.x / lanes;

  // Indices, then rows, neither with branches, so that no load waits for another.
  int64_t here[kInPlaceUnits], before[kInPlaceUnits];
#pragma unroll
  for (int u = 0; u < kInPlaceUnits; ++u) {
    const int64_t i = first + u * step;
    here[u] = inside && i < m ? index[i * p.indices.stride_m] : kSkip;
    before[u] = inside && 0 < i && i < m ? index[(i - 1) * p.indices.stride_m] : kSkip;
  }
  Unit rows[kInPlaceUnits];
  unsigned written = 0;  // bit u: rows[u] is to be
#pragma unroll
  for (int u = 0; u < kInPlaceUnits; ++u) {
    const int64_t to = first + u * step;
    const bool moves =
        here[u] > before[u] && here[u] > to && here[u] < p.n && data.has_page(here[u]) && data.has_page(to);
    written |= static_cast<unsigned>(moves || (!kPaged && here[u] == -1)) << u;
    rows[u] = moves ? *reinterpret_cast<const Unit*>(data.row(here[u])) : Unit{};
  }
  block.wait_for_reads();
#pragma unroll
  for (int u = 0; u < kInPlaceUnits; ++u)
    if (written >> u & 1) *reinterpret_cast<Unit*>(data.row(first + u * step)) = rows[u];
}

// fn(Unit{}, chunks, lanes_log2, slices) for the call.
template <class Fn>
inline void with_compact_plan(const CompactKVParams& p, const Fn& fn) {
  const uint64_t bits = address_bits(p.k, p.b, p.heads, p.n) | address_bits(p.v, p.b, p.heads, p.n);
  with_unit(bits, [&](auto unit) {
    const int64_t units = (p.k.row_bytes > p.v.row_bytes ? p.k.row_bytes : p.v.row_bytes) / sizeof(unit);
    const int lanes_log2 = shared_lanes_log2(units), rows = (kMoveThreads >> lanes_log2) * kInPlaceUnits;
    const int64_t slices = ((units - 1) >> lanes_log2) + 1;
    fn(unit, InPlacePlan::of(p.indices.m, 2 * p.b * p.heads * slices, rows), lanes_log2, static_cast<unsigned>(slices));
  });
}

inline int64_t compact_kv__workspace(const CompactKVParams& p) {
  int64_t bytes = 0;
  with_compact_plan(p,
                    [&](auto, const InPlacePlan& chunks, int, unsigned) { bytes = bytes_of<InPlaceMemory>(chunks); });
  return bytes;
}

inline void compact_kv__cuda(const CompactKVParams& p, void* workspace, cudaStream_t stream) {
  if (p.b * p.heads * p.indices.m == 0) return;
  if (const int64_t bytes = compact_kv__workspace(p)) zero_async(workspace, bytes, stream);
  with_compact_plan(p, [&](auto unit, const InPlacePlan& chunks, int lanes_log2, unsigned slices) {
    Sections sections{workspace};
    const InPlaceMemory memory(chunks, sections);
    with_pages(p.k, [&](auto paged) {
      launch<compact_kv_kernel<decltype(unit), paged>>(grid_of(chunks.chains * chunks.count), kMoveThreads, 0, stream,
                                                       p, chunks, memory, lanes_log2, slices);
    });
  });
}

}  // namespace
}  // namespace kvops
