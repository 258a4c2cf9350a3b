// Moves the kept rows of K and V to the front, in place.
//
// Bytes that must move: each kept row read once and written once. Kept slots ascend, so slot i receives a row from
// index[i] >= i, and in_place.cuh lets many blocks share a head. A chunk of 32 KiB is read into registers, and written
// once the rows there have been read. A single layer of 8 heads that keeps 32768 rows of 256 bytes is 4096
// blocks. At least four of them run on a multiprocessor, so 128 KiB are in flight; an H200 needs about 30 KiB to keep
// its memory busy. Rows of more than 512 bytes are cut into column slices, each of which is a chain of its own.
//
// A launch takes its layers by value: one set of strides, and the addresses of each layer.
//
// Grid: x runs over (chunk, layer, batch, K or V, head, slice), in ticket order. The host does not read the indices. -1
// writes zeros. An entry outside [-1, n), not above the one before it, or below its own slot is skipped, and its slot
// is left unchanged. With pages, so are entries of -1, and entries whose source or destination page does not exist.
#pragma once
#include "../ops/compact_kv_.h"
#include "in_place.cuh"

namespace kvops {
namespace {

constexpr int64_t kSkip = -2;       // not an index
constexpr int kCompactLayers = 64;  // per launch, so that the parameters stay within CUDA's 4 KB

// Layers with the same strides for rows and indices; only the addresses differ.
struct CompactBatch {
  struct Layer {
    char* data[2];  // K, V
    const int64_t* indices;
  };
  KVView kv[2];       // of the first layer
  IndexView indices;  // of the first layer
  int64_t b, heads, n;
  Layer layers[kCompactLayers];
};
static_assert(sizeof(CompactBatch) + 64 <= 4096);

template <class Unit, bool kPaged>
__global__ void __launch_bounds__(kMoveThreads, kPaged ? 3 : 4)  // page lookups take registers
    compact_kv_kernel(const __grid_constant__ CompactBatch p, InPlacePlan chunks, InPlaceMemory memory, int lanes_log2,
                      unsigned slices) {
  const InPlaceChunk block(chunks, memory);
  const unsigned heads = static_cast<unsigned>(p.heads), slice = block.chain % slices, h = block.chain / slices % heads,
                 tensor_row = block.chain / slices / heads, requests = static_cast<unsigned>(p.b),
                 b = (tensor_row >> 1) % requests;
  const CompactBatch::Layer& layer = p.layers[(tensor_row >> 1) / requests];
  KVView x = p.kv[tensor_row & 1];
  x.data = layer.data[tensor_row & 1];
  const int lanes = 1 << lanes_log2, step = kMoveThreads / lanes;
  const int64_t begin = static_cast<int64_t>(slice) * lanes * sizeof(Unit);  // of the slice, in bytes
  if (begin >= x.row_bytes) return;                                          // the other tensor's rows are wider
  const int64_t column = begin + threadIdx.x % lanes * sizeof(Unit), m = p.indices.m;
  const bool inside = column < x.row_bytes;
  const int64_t* const index = layer.indices + b * p.indices.stride_b + h * p.indices.stride_h;
  HeadRows data = head_rows<kPaged>(x, b, h);
  data.data += column;
  const int64_t first = static_cast<int64_t>(block.chunk) * chunks.rows + threadIdx.x / lanes;

  // Load indices, then rows, both without branches, so that no load waits for another.
  int64_t here[kInPlaceUnits], before[kInPlaceUnits];
#pragma unroll
  for (int u = 0; u < kInPlaceUnits; ++u) {
    const int64_t i = first + u * step;
    here[u] = inside && i < m ? index[i * p.indices.stride_m] : kSkip;
    before[u] = inside && 0 < i && i < m ? index[(i - 1) * p.indices.stride_m] : kSkip;
  }
  Unit rows[kInPlaceUnits];
  unsigned written = 0;  // bit u: write rows[u]
#pragma unroll
  for (int u = 0; u < kInPlaceUnits; ++u) {
    const int64_t to = first + u * step;
    const bool moves =
        here[u] > before[u] && here[u] > to && here[u] < p.n && data.has_page(here[u]) && data.has_page(to);
    written |= static_cast<unsigned>(moves || (!kPaged && here[u] == -1)) << u;
    rows[u] = moves ? *reinterpret_cast<const Unit*>(data.row(here[u])) : Unit{};
  }
  unsigned read = 0;
#pragma unroll
  for (int u = 0; u < kInPlaceUnits; ++u) read ^= some_bits(rows[u]);
  const int64_t begins = static_cast<int64_t>(block.chunk) * chunks.rows;
  block.wait_for_reads(read, [&](unsigned slot) {
    const int64_t from = index[slot * p.indices.stride_m];
    return from < 0 || from >= begins;  // -1 comes last
  });
#pragma unroll
  for (int u = 0; u < kInPlaceUnits; ++u)
    if (written >> u & 1) *reinterpret_cast<Unit*>(data.row(first + u * step)) = rows[u];
}

// Calls fn(batch, layers, bits) for groups of layers with the same strides, as many at a time as fit. bits: the bitwise
// or of all their addresses.
template <class Fn>
inline void for_compact_batches(const CompactKVParams& p, const Fn& fn) {
  const auto alike = [](const CompactKVLayer& x, const CompactKVLayer& y) {
    const IndexView &i = x.indices, &j = y.indices;
    return x.k.same_strides(y.k) && x.v.same_strides(y.v) && i.stride_b == j.stride_b && i.stride_h == j.stride_h &&
           i.stride_m == j.stride_m && i.m == j.m;
  };
  CompactBatch batch = {};
  batch.b = p.b;
  batch.heads = p.heads;
  batch.n = p.n;
  for (int64_t i = 0; i < p.num_layers;) {
    const CompactKVLayer& first = p.layers[i];
    batch.kv[0] = first.k, batch.kv[1] = first.v, batch.indices = first.indices;
    uint64_t bits = 0;
    int count = 0;
    for (; i < p.num_layers && count < kCompactLayers && alike(p.layers[i], first); ++i, ++count) {
      const CompactKVLayer& x = p.layers[i];
      batch.layers[count] = {{x.k.data, x.v.data}, x.indices.data};
      bits |= address_bits(x.k, p.b, p.heads, p.n) | address_bits(x.v, p.b, p.heads, p.n);
    }
    fn(batch, count, bits);
  }
}

// Calls fn(Unit{}, batch, chunks, lanes_log2, slices) for each launch of the call.
template <class Fn>
inline void for_compactions(const CompactKVParams& p, const Fn& fn) {
  for_compact_batches(p, [&](const CompactBatch& batch, int64_t layers, uint64_t bits) {
    with_unit(bits, [&](auto unit) {
      if (batch.indices.m == 0) return;
      const int64_t k = batch.kv[0].row_bytes, v = batch.kv[1].row_bytes, units = (k > v ? k : v) / sizeof(unit);
      const int lanes_log2 = shared_lanes_log2(units), rows = (kMoveThreads >> lanes_log2) * kInPlaceUnits;
      const int64_t slices = ((units - 1) >> lanes_log2) + 1;
      fn(unit, batch, InPlacePlan::of(batch.indices.m, 2 * layers * p.b * p.heads * slices, rows), lanes_log2,
         static_cast<unsigned>(slices));
    });
  });
}

// For all launches, one after the other.
inline int64_t compact_kv__workspace(const CompactKVParams& p) {
  Sections sections;
  for_compactions(
      p, [&](auto, const CompactBatch&, const InPlacePlan& chunks, int, unsigned) { InPlaceMemory(chunks, sections); });
  return sections.bytes;
}

inline void compact_kv__cuda(const CompactKVParams& p, void* workspace, cudaStream_t stream) {
  if (const int64_t bytes = compact_kv__workspace(p)) zero_async(workspace, bytes, stream);
  Sections sections{workspace};
  for_compactions(
      p, [&](auto unit, const CompactBatch& batch, const InPlacePlan& chunks, int lanes_log2, unsigned slices) {
        const InPlaceMemory memory(chunks, sections);
        with_pages(batch.kv[0], [&](auto paged) {
          launch<compact_kv_kernel<decltype(unit), paged>>(grid_of(chunks.chains * chunks.count), kMoveThreads, 0,
                                                           stream, batch, chunks, memory, lanes_log2, slices);
        });
      });
}

}  // namespace
}  // namespace kvops
