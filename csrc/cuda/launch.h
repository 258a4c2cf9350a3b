// What every cuda/<op>.cu does around its kernels: torch's current stream, workspace, registration.
#pragma once
#include "../check.h"
// torch's headers first: the simulator gives CUDA's words a meaning of its own.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "vec.cuh"

// As STABLE_TORCH_LIBRARY_IMPL. Simulated kernels stand in for the CPU's.
#ifdef KVOPS_CUDASIM
#define KVOPS_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m)
#else
#define KVOPS_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(kvops, CUDA, m)
#endif

namespace kvops {

// Makes the tensor's device the current one while it lives, and knows torch's current stream there.
class OnDevice {
 public:
#ifdef KVOPS_CUDASIM
  explicit OnDevice(const Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
#else
  explicit OnDevice(const Tensor& x) : guard_(x.get_device_index()) {
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
#endif
};

// Memory for one call, from torch's caching allocator: what runs later in the stream may have it again.
class Workspace {
 public:
  Workspace(const char* op, const Tensor& like, int64_t bytes)
      : memory_(empty(op, like, std::array<int64_t, 1>{(bytes + 3) / 4}, ScalarType::Float)) {}
  void* data() const { return memory_.mutable_data_ptr(); }

 private:
  Tensor memory_;
};

// The kernels hold a row in the registers of one warp.
inline void check_head_dim(const char* op, const char* name, const Tensor& x) {
  KVOPS_CHECK(x.size(3) <= kMaxHeadDim, op, ": head_dim of ", name, " must be at most ", kMaxHeadDim, " on a GPU, got ",
              x.size(3));
}

}  // namespace kvops
