// cp.async: copies from global to shared memory that bypass registers and are waited for in groups.
//
// A thread waits only for its own copies. Others may read them after a barrier.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

// Starts copying 16 bytes; both addresses must be multiples of 16.
__device__ inline void copy_async(uint4* to, const void* from) {
#ifdef __CUDACC__
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
  cudasim::copy_async(to, from, 16);
#endif
}

// The same if `there`; otherwise writes zeros and does not read `from`. kBytes: 16, or 8 into a 16-byte slot; both
// addresses must be multiples of kBytes.
template <int kBytes = 16>
__device__ inline void copy_async(uint4* to, const void* from, bool there) {
#ifdef __CUDACC__
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(from), "r"(there ? 8 : 0)
                 : "memory");
#else
  if (there)
    cudasim::copy_async(to, from, kBytes);
  else
    memset(to, 0, kBytes);
#endif
}

// Starts copying one piece of T as stored. Not kWide: from any address, and done when it returns.
template <class T, bool kWide>
__device__ inline void copy_piece(uint4* to, const char* from) {
  if constexpr (!kWide) {
#pragma unroll 2  // a whole piece at once would spill
    for (int i = 0; i < kPieceBytes<T> / 4; ++i) reinterpret_cast<unsigned*>(to)[i] = load_word<T>(from + 4 * i);
  } else if constexpr (kPieceBytes<T> == 8) {
    copy_async<8>(to, from, true);
  } else {
    copy_async(to, from);
  }
}

// The same if it is `there`; otherwise writes zeros. A condition costs instructions even where it is always true.
template <class T, bool kWide>
__device__ inline void copy_piece(uint4* to, const char* from, bool there) {
  if constexpr (kWide)
    copy_async<kPieceBytes<T>>(to, from, there);
  else if (there)
    copy_piece<T, false>(to, from);
  else
    *to = uint4{};
}

// Ends a group of copies.
__device__ inline void end_copies() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  cudasim::copy_async_commit();
#endif
}

// Waits for all but the last kGroups groups.
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
