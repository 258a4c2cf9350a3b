// The one door to CUDA for kernel files: nvcc's own headers, or the simulator's where a host compiler runs the kernels
// in the tests. Kernel files (.cuh) include this and other .cuh files, nothing else.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#include <stdexcept>
#include <string>

// Declares `name`, a pointer to the block's dynamic shared memory.
#define DYNAMIC_SHARED(type, name)                                      \
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared_bytes)

namespace kvops {
namespace {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("kvops: CUDA error: ") + cudaGetErrorString(error));
}

// Kernel<<<grid, block, dynamic_bytes, stream>>>(args...), with errors as exceptions.
template <auto Kernel, class... Args>
void launch(dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream, Args... args) {
  if (dynamic_bytes > 48 * 1024)
    check_cuda(
        cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic_bytes)));
  Kernel<<<grid, block, dynamic_bytes, stream>>>(args...);
  check_cuda(cudaGetLastError());
}

// Zeroes memory in the stream's order.
inline void zero_async(void* memory, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(memory, 0, bytes, stream));
}

// Of the current device.
inline int multiprocessors() {
  int device, count;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Bytes that a block may have.
inline int shared_memory() {
  int device, bytes;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

}  // namespace
}  // namespace kvops
#else
#include "cudasim.h"

namespace kvops {
namespace {

using ::launch;

inline void zero_async(void* memory, size_t bytes, cudaStream_t) {
  memset(memory, 0, bytes);
}

inline int multiprocessors() {
  return 4;  // few, so that small tests fill more than one wave
}

inline int shared_memory() {
  return 99 * 1024;  // the least of all GPUs that are supported
}

}  // namespace
}  // namespace kvops
#endif

namespace kvops {
namespace {

// A grid whose x runs over `blocks`. What is more than CUDA allows is refused by name, not wrapped around.
inline dim3 grid_of(int64_t blocks, unsigned y = 1) {
  if (blocks > 0x7fffffff)
    throw std::runtime_error("kvops: the call needs " + std::to_string(blocks) + " CUDA blocks, at most 2^31 - 1 fit");
  return dim3(static_cast<unsigned>(blocks), y);
}

}  // namespace
}  // namespace kvops
