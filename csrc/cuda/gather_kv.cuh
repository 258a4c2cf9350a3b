// Gathers the kept rows of K and V.
//
// Bytes that must move: each kept row read once and written once. This is pure data movement. Accesses are as wide as
// all pointers and strides allow (usually 16 bytes), and each lane has kAhead of them in flight. 2^lanes_log2
// neighbouring lanes share a row, so consecutive kept rows are written to consecutive bytes.
//
// Grid: x runs over (batch, head, tile of kept rows), y over K and V.
//
// The host does not read the indices (that would wait for the GPU): -1, and anything outside [0, n), writes zeros.
#pragma once
#include "../ops/gather_kv.h"
#include "move.cuh"

namespace kvops {
namespace {

template <class Unit, bool kPaged>
__global__ void __launch_bounds__(kMoveThreads) gather_kv_kernel(GatherKVParams p, int lanes_log2, unsigned tiles) {
  const KVView in = blockIdx.y ? p.v : p.k, out = blockIdx.y ? p.v_out : p.k_out;
  const unsigned heads = static_cast<unsigned>(p.heads), b = blockIdx.x / tiles / heads, h = blockIdx.x / tiles % heads;
  const int64_t m = p.indices.m;
  const int64_t* index = p.indices.data + b * p.indices.stride_b + h * p.indices.stride_h;
  const HeadRows from = head_rows<kPaged>(in, b, h);
  char* const to = out.row(b, h, 0);

  const int lanes = 1 << lanes_log2, lane = threadIdx.x % lanes, step = kMoveThreads / lanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x % tiles) * (step * kAhead) + threadIdx.x / lanes;
  int64_t source[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
    const int64_t i = first + u * step;
    source[u] = i < m ? index[i * p.indices.stride_m] : -1;
  }
  const int units = static_cast<int>(in.row_bytes / sizeof(Unit));
  for (int c = lane; c < units; c += lanes) {
    // Ordinary loads: the compiler keeps them ahead of the stores, which might alias them for all it knows.
    Unit x[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      x[u] = 0 <= source[u] && source[u] < p.n ? reinterpret_cast<const Unit*>(from.row(source[u]))[c] : Unit{};
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (first + u * step < m) reinterpret_cast<Unit*>(to + (first + u * step) * out.stride_n)[c] = x[u];
  }
}

inline void gather_kv_cuda(const GatherKVParams& p, cudaStream_t stream) {
  const int64_t m = p.indices.m;
  if (p.b * p.heads * m == 0) return;
  const uint64_t bits = address_bits(p.k, p.b, p.heads, p.n) | address_bits(p.v, p.b, p.heads, p.n) |
                        address_bits(p.k_out, p.b, p.heads, m) | address_bits(p.v_out, p.b, p.heads, m);
  with_unit(bits, [&](auto unit) {
    using Unit = decltype(unit);
    const int64_t widest = p.k.row_bytes > p.v.row_bytes ? p.k.row_bytes : p.v.row_bytes;
    const int lanes_log2 = shared_lanes_log2(widest / sizeof(Unit));
    const int64_t tile = (kMoveThreads >> lanes_log2) * kAhead, tiles = (m + tile - 1) / tile;
    with_pages(p.k, [&](auto paged) {
      launch<gather_kv_kernel<Unit, paged>>(grid_of(p.b * p.heads * tiles, 2), kMoveThreads, 0, stream, p, lanes_log2,
                                            static_cast<unsigned>(tiles));
    });
  });
}

}  // namespace
}  // namespace kvops
