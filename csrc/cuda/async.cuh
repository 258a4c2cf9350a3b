// cp.async: copies from global to shared memory that pass no register, and that are waited for in groups.
//
// A thread waits for its own copies only. Others may read them after a barrier.
#pragma once
#include "device.cuh"

namespace kvops {
namespace {

// Begins to copy 16 bytes; both addresses are multiples of 16.
__device__ inline void copy_async(uint4* to, const void* from) {
#ifdef __CUDACC__
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
  cudasim::copy_async(to, from, 16);
#endif
}

// The same where `there`, else 16 bytes of zeros; `from` is not read then.
__device__ inline void copy_async(uint4* to, const void* from, bool there) {
#ifdef __CUDACC__
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(there ? 16 : 0)
               : "memory");
#else
  if (there)
    cudasim::copy_async(to, from, 16);
  else
    *to = uint4{};
#endif
}

// Ends a group of copies.
__device__ inline void end_copies() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  cudasim::copy_async_commit();
#endif
}

// Waits for all groups but the last kGroups.
template <int kGroups>
__device__ inline void wait_for_copies() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#else
  cudasim::copy_async_wait(kGroups);
#endif
}

}  // namespace
}  // namespace kvops
