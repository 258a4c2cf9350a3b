// The only access to CUDA from kernel files: nvcc's own headers, or the simulator's when a host compiler builds the
// kernels for the tests. Kernel files (.cuh) include only this and other .cuh files.
#pragma once
#include <algorithm>

#include "../call.h"
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
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed call leaves its error behind; clear it so that the next launch does not report it
  throw std::runtime_error(std::string("kvops: CUDA error: ") + cudaGetErrorString(error));
}

// The kernel's attributes, for the code that the current device runs.
template <auto Kernel>
cudaFuncAttributes attributes_of() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, Kernel));
  return attributes;
}
template <auto Kernel>
size_t static_shared_memory() {
  static const size_t bytes = attributes_of<Kernel>().sharedSizeBytes;
  return bytes;
}

template <auto Kernel>
void allow_dynamic_shared_memory(size_t bytes) {
  check_cuda(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// Calls fn(config) with a launch configuration.
template <class Fn>
void with_config(unsigned cluster, dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream, const Fn& fn) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = dynamic_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  check_cuda(fn(config));
}

template <auto Kernel, class... Args>
void start_kernel(unsigned cluster, dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream, Args... args) {
  with_config(cluster, grid, block, dynamic_bytes, stream,
              [&](const auto& config) { return cudaLaunchKernelEx(&config, Kernel, args...); });
}

// Zeroes memory, in stream order.
inline void zero_async(void* memory, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(memory, 0, bytes, stream));
}

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount);
}
// Shared memory that a block may use, static and dynamic together, in bytes.
inline int shared_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}
// Whether the kernel can be launched in clusters. It cannot if the driver compiled it from the PTX of an older
// architecture.
template <auto Kernel>
bool has_clusters() {
  return device_attribute(cudaDevAttrClusterLaunch) && attributes_of<Kernel>().ptxVersion >= 90;
}
template <auto Kernel>
int clusters_at_once(unsigned cluster, dim3 block, size_t dynamic_bytes) {
  int count = 0;
  with_config(cluster, dim3(cluster), block, dynamic_bytes, nullptr,
              [&](const auto& config) { return cudaOccupancyMaxActiveClusters(&count, Kernel, &config); });
  return count;
}

}  // namespace
}  // namespace kvops
#else
#include "cudasim.h"

namespace kvops {
namespace {

using cudasim::allow_dynamic_shared_memory;
using cudasim::start_kernel;
using cudasim::static_shared_memory;

inline void zero_async(void* memory, size_t bytes, cudaStream_t) {
  cudasim::zero(memory, bytes);
}

inline int multiprocessors() {
  return cudasim::device().multiprocessors;
}

inline int shared_memory() {
  return static_cast<int>(cudasim::device().shared_memory);
}

template <auto Kernel>
bool has_clusters() {
  return cudasim::device().clusters;
}

// Limited by the threads of a multiprocessor only: the simulator does not model registers.
template <auto Kernel>
int clusters_at_once(unsigned cluster, dim3 block, size_t) {
  return multiprocessors() * static_cast<int>(2048 / block.x) / static_cast<int>(cluster);
}

}  // namespace
}  // namespace kvops
#endif

namespace kvops {
namespace {

inline cudaStream_t stream_of(const Call& call) {
  return static_cast<cudaStream_t>(call.stream);
}

// A kernel must opt in to more than 48 KB of static and dynamic shared memory. It requests the maximum, so that threads
// that launch it with different sizes do not lower each other's limit.
template <auto Kernel>
void allow_shared_memory(size_t dynamic_bytes) {
  const size_t fixed = static_shared_memory<Kernel>();
  if (fixed + dynamic_bytes > 48 * 1024)
    allow_dynamic_shared_memory<Kernel>(std::max(dynamic_bytes, shared_memory() - fixed));
}

// Kernel<<<grid, block, dynamic_bytes, stream>>>(args...), with errors thrown as exceptions.
template <auto Kernel, class... Args>
void launch(dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream, Args... args) {
  allow_shared_memory<Kernel>(dynamic_bytes);
  start_kernel<Kernel>(1, grid, block, dynamic_bytes, stream, args...);
}

// The same in clusters of `cluster` consecutive blocks along x, which can access each other's shared memory
// (cluster.cuh).
template <auto Kernel, class... Args>
void launch_clusters(unsigned cluster, dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t stream, Args... args) {
  allow_shared_memory<Kernel>(dynamic_bytes);
  start_kernel<Kernel>(cluster, grid, block, dynamic_bytes, stream, args...);
}

// The number of clusters that the current device runs at the same time. Each cluster lies within one part of the GPU,
// and the number of multiprocessors in a part need not be a multiple of the cluster size.
template <auto Kernel>
int resident_clusters(unsigned cluster, dim3 block, size_t dynamic_bytes) {
  allow_shared_memory<Kernel>(dynamic_bytes);
  return clusters_at_once<Kernel>(cluster, block, dynamic_bytes);
}

// A grid whose x runs over `blocks`. More than CUDA allows raises an error instead of wrapping around.
inline dim3 grid_of(int64_t blocks, unsigned y = 1) {
  if (blocks > 0x7fffffff)
    throw std::runtime_error("kvops: the call needs " + std::to_string(blocks) + " CUDA blocks, at most 2^31 - 1 fit");
  return dim3(static_cast<unsigned>(blocks), y);
}

// Consecutive sections of a workspace, each aligned to 16 bytes. An operator's <Op>Memory adds its sections in its
// constructor, which runs once without a workspace to compute the size, and once with it.
struct Sections {
  void* workspace = nullptr;
  int64_t bytes = 0;  // of all sections so far

  template <class T>
  T* add(int64_t count) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(workspace) + bytes;
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return reinterpret_cast<T*>(at);
  }
};

// The number of bytes that Memory(args..., sections) needs.
template <class Memory, class... Args>
inline int64_t bytes_of(const Args&... args) {
  Sections sections;
  Memory(args..., sections);
  return sections.bytes;
}

}  // namespace
}  // namespace kvops
