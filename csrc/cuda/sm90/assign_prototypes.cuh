// assign_prototypes for Hopper: the prototype with the highest cosine for each key.
//
// Keys are the rows of a wgmma (its M), 64 at a time, loaded by TMA; prototypes are its columns, 128 at a time. All
// prototypes of a head stay in shared memory while a block goes through its run of keys. A thread has 32 columns for
// each of two keys. It keeps the largest product and its index, and once all prototypes have been processed, the four
// lanes that share a key compare their results. All products of a key are thus in one warpgroup's registers, and the
// two warpgroups take turns on the tensor cores. For a tile of 64 x 128 products at d = 128, a multiprocessor of an
// H200 needs 512 cycles of wgmma and 384 of comparisons (three instructions per product at half rate); one warpgroup
// compares while the other multiplies.
//
// Prototypes that do not fit in shared memory beside two tiles of keys (768 fit with d = 128, 1664 with 64, 256 with
// 256) are left to the portable kernel. Both kernels redo keys whose best product is outside the safe range.
#pragma once
#include "../prototypes.cuh"
#include "tile.cuh"

namespace kvops::sm90 {
namespace {

constexpr int kColumns = 128;  // prototypes per tile

// Offsets in shared memory.
struct AssignShared {
  int keys, full, empty, loaded, bytes;  // the prototypes, [tiles, kColumns, d], come first

  KVOPS_HOST_DEVICE AssignShared(int tiles, int stages, int d)
      : keys(tiles * kColumns * d * 2),
        full(keys + stages * kRows * d * 2),
        empty(full + stages * 8),
        loaded(empty + stages * 8),
        bytes(loaded + 8) {}
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    assign_prototypes_sm90_kernel(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap units,
                                  const AssignPrototypesParams p, int tiles, int stages, int runs) {
  unsigned char* const shared = aligned_shared();
  const AssignShared at(tiles, stages, kDim);
  T* const prototypes = reinterpret_cast<T*>(shared);
  T* const k = reinterpret_cast<T*>(shared + at.keys);
  uint64_t* const loaded = reinterpret_cast<uint64_t*>(shared + at.loaded);
  Ring ring{reinterpret_cast<uint64_t*>(shared + at.full), reinterpret_cast<uint64_t*>(shared + at.empty), stages};

  const int unit = static_cast<int>(blockIdx.x) / runs, run = static_cast<int>(blockIdx.x) % runs;
  const int batch = unit / static_cast<int>(p.heads), head = unit % static_cast<int>(p.heads);
  const int first = static_cast<int>(p.slots.first(batch)), last = first + static_cast<int>(p.slots.count(batch));
  const int64_t blocks = (p.n + kRows - 1) / kRows;  // of keys
  const int begin = static_cast<int>(blocks * run / runs), end = static_cast<int>(blocks * (run + 1) / runs);

  if (threadIdx.x == 0) {
    ring.init(4);
    barrier_init(loaded, 1);
    barriers_made();
  }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {  // the producer
    if (threadIdx.x == kConsumers) {
      barrier_announce(loaded, tiles * kColumns * kDim * 2);
      for (int tile = 0; tile < tiles; ++tile)
        copy_keys<T, kDim, kColumns>(units, loaded, prototypes + tile * kColumns * kDim, tile * kColumns, head, batch);
      for (int block = begin; block < end; ++block, ring.advance(1)) {
        uint64_t* const full = ring.fill(kRows * kDim * 2);
        copy_keys<T, kDim, kRows>(keys, full, k + ring.stage * kRows * kDim, block * kRows, head, batch);
      }
    }
    return;
  }

  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  barrier_wait(loaded, 0);
  ring.advance(warpgroup);
  for (int block = begin + warpgroup; block < end; block += kGroups, ring.advance(kGroups)) {
    Best best[2] = {Best::none(), Best::none()};
    ring.wait();
    for (int tile = 0; tile < tiles; ++tile) {
      float x[kColumns / 2];
      multiply_keys<T, kDim, kColumns>(x, k + ring.stage * kRows * kDim, prototypes + tile * kColumns * kDim);
      if (tile == tiles - 1) ring.release();
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i)
        best[i / 2 % 2].meet(x[i], tile * kColumns + Accumulator::column(thread, i));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
        best[i].meet({__shfl_xor_sync(kWarp, best[i].product, step), __shfl_xor_sync(kWarp, best[i].prototype, step)});
    }
    // Two of the four lanes that share two keys take one key each.
    const int slot = block * kRows + Accumulator::row(thread, 2 * (thread % 2));
    if (thread % 2) best[0] = best[1];
    finish_assignment<T, false>(p, unit, slot, thread % 4 < 2 && slot < p.n, first <= slot && slot < last, best[0]);
  }
}

// Returns false, without doing anything, if it does not support the call.
inline bool assign_prototypes_hopper(const AssignPrototypesParams& p, const KVView& units, int64_t rows,
                                     cudaStream_t stream) {
  constexpr int kMostStages = 4;
  if (!serves(p.dtype, p.d, p.n) || rows > 4096) return false;
  const int tiles = static_cast<int>((rows + kColumns - 1) / kColumns);
  bool served = false;
  with_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    with_head_dim(p.d, [&](auto dim) {
      constexpr int kDim = decltype(dim)::value;
      int stages = kMostStages;
      while (stages > 1 && AssignShared(tiles, stages, kDim).bytes > kSharedBytes) --stages;
      TensorMap keys, prototypes;
      if (stages == 1 || !tensor_map<T>(keys, p.k, p.b, p.heads, p.n, kRows) ||
          !tensor_map<T>(prototypes, units, p.b, p.heads, rows, kColumns))
        return;
      const int64_t heads = p.b * p.heads, blocks = (p.n + kRows - 1) / kRows, fill = multiprocessors() / heads;
      const int64_t runs = fill < 1 ? 1 : fill < blocks ? fill : blocks;
      launch<assign_prototypes_sm90_kernel<T, kDim>>(grid_of(heads * runs), kThreads,
                                                     AssignShared(tiles, stages, kDim).bytes + 1024, stream, keys,
                                                     prototypes, p, tiles, stages, static_cast<int>(runs));
      served = true;
    });
  });
  return served;
}

}  // namespace
}  // namespace kvops::sm90
