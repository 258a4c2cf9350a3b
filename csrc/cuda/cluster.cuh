// How blocks of a grid communicate: through shared memory within a cluster (from sm_90 on), otherwise through flags in
// global memory.
//
// All blocks of a cluster run at the same time. Other blocks need not, so a block may wait only for blocks that have
// already started. A ticket, a counter that every block increments when it starts, guarantees this.
#pragma once
#include "device.cuh"

namespace kvops {
namespace {

// This block's rank in its cluster.
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

// __syncthreads() for all threads of all blocks of the cluster. A block must not exit while others may still read its
// shared memory, so the last cluster_sync() must come after the last of_block().
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

// Translates p, an address in this block's dynamic shared memory, to the same place in block `rank` of the cluster.
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

// A flag in global memory. Everything that a thread wrote or observed before it stores the flag is visible to the
// thread that loads it. To include a block's other threads, put a __syncthreads() before the store and another after
// the load.
#ifdef __CUDACC__
__device__ inline unsigned load_acquire(const unsigned* flag) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
  return x;
}
__device__ inline void store_release(unsigned* flag, unsigned x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(x) : "memory");
}
#else
using cudasim::load_acquire, cudasim::store_release;
#endif

}  // namespace
}  // namespace kvops
