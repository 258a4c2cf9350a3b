// How blocks of a grid see each other: shared memory within a cluster (from sm_90 on), flags in global memory
// elsewhere.
//
// Blocks of a cluster run at the same time. Other blocks need not: a block may wait only for one that has begun, which
// a ticket tells (a counter that every block increments when it starts).
#pragma once
#include "device.cuh"

namespace kvops {
namespace {

// This block's place among those of its cluster.
__device__ inline unsigned cluster_rank() {
#ifdef __CUDACC__
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
#else
  return cudasim::cluster_rank();
#endif
}

// __syncthreads() of all threads of all blocks of the cluster. A block must not end while others may still look into
// its shared memory: the last of them comes behind the last of_block().
#ifdef __CUDACC__
__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();
#endif
}
#else
using cudasim::cluster_sync;
#endif

// p, an address in this block's dynamic shared memory, in that of block `rank` of the cluster.
template <class T>
__device__ inline T* of_block(T* p, unsigned rank) {
#ifdef __CUDACC__
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  __trap();
  return p;
#endif
#else
  return static_cast<T*>(cudasim::of_block(p, rank));
#endif
}

// A flag in global memory: what a thread has written, and seen, before it stores the flag is there for the one that
// loads it. A block's other threads are included by a __syncthreads() before the store, and behind the load.
__device__ inline unsigned load_acquire(const unsigned* flag) {
#ifdef __CUDACC__
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
  return x;
#else
  return cudasim::load_acquire(flag);
#endif
}
__device__ inline void store_release(unsigned* flag, unsigned x) {
#ifdef __CUDACC__
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(x) : "memory");
#else
  cudasim::store_release(flag, x);
#endif
}

}  // namespace
}  // namespace kvops
