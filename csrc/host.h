// What the host bodies share: ops/<op>.cpp checks the arguments, allocates the outputs and calls launch_<op>. Each is
// compiled twice: for libkvops.so, and with KVOPS_GPU for libkvops_cuda.so, where launch_<op> comes from cuda/<op>.cu.
#pragma once

#include <algorithm>
#include <new>

#include "call.h"
#include "check.h"
#include "registry.h"
#if defined(KVOPS_GPU) && !defined(KVOPS_CUDASIM)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif
#ifndef KVOPS_GPU
#include <sys/mman.h>
#endif

// Registers kernels for this library's device. The tests' simulator registers its kernels as CPU kernels.
#if defined(KVOPS_GPU) && !defined(KVOPS_CUDASIM)
#define KVOPS_IMPL(m) KVOPS_REGISTER(IMPL, "CUDA", m)
#else
#define KVOPS_IMPL(m) KVOPS_REGISTER(IMPL, "CPU", m)
#endif

namespace kvops {

// Failed allocation. Python sees MemoryError, or torch.OutOfMemoryError for GPU memory (kvops/ops/dispatch.py).
class OutOfMemory : public std::bad_alloc {
 public:
  OutOfMemory(const char* op, int64_t bytes, const Tensor& on) {
    std::ostringstream text;
    text << op << (on.is_cuda() ? ": CUDA out of memory" : ": out of memory") << ", could not allocate " << bytes
         << " bytes";
    if (on.is_cuda()) text << " on " << device(on);
    text_ = text.str();
  }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// The dtype code of torch's C shim, and the bytes per element.
inline std::pair<int32_t, int64_t> shim_type(const char* op, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return {aoti_torch_dtype_float32(), 4};
    case ScalarType::Half:
      return {aoti_torch_dtype_float16(), 2};
    case ScalarType::BFloat16:
      return {aoti_torch_dtype_bfloat16(), 2};
    case ScalarType::Int:
      return {aoti_torch_dtype_int32(), 4};
    case ScalarType::Long:
      return {aoti_torch_dtype_int64(), 8};
    case ScalarType::Float8_e4m3fn:
      return {aoti_torch_dtype_float8_e4m3fn(), 1};
    case ScalarType::Float8_e5m2:
      return {aoti_torch_dtype_float8_e5m2(), 1};
    case ScalarType::Byte:
      return {aoti_torch_dtype_uint8(), 1};
    case ScalarType::Char:
      return {aoti_torch_dtype_int8(), 1};
    default:
      fail(op, ": cannot allocate a result of dtype ", dtype_name(type));
  }
}

// A new contiguous tensor on like's device.
template <size_t N>
Tensor empty(const char* op, const Tensor& like, const std::array<int64_t, N>& sizes, ScalarType type) {
  std::array<int64_t, N> strides;
  int64_t size = 1;
  for (size_t i = N; i-- > 0;) {
    strides[i] = size;
    KVOPS_CHECK(sizes[i] == 0 || size <= std::numeric_limits<int64_t>::max() / 8 / sizes[i], op,
                ": the result has more elements than fit int64");
    size *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t device;
  aoti_torch_get_device_type(like.get(), &device);
  const auto [dtype, item] = shim_type(op, type);
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(N, sizes.data(), strides.data(), dtype, device, like.get_device_index(), &handle))
    throw OutOfMemory(op, size * item, like);
  return Tensor(handle);
}

// New rows for K or V: contiguous, with like's dtype and head_dim. On the CPU, the first touch of fresh memory takes
// one page fault per page, which costs more than writing the rows. Huge pages make that rare.
inline Tensor empty_rows(const char* op, const Tensor& like, int64_t b, int64_t heads, int64_t m) {
  const Tensor out = empty(op, like, std::array{b, heads, m, like.size(3)}, like.scalar_type());
#if !defined(KVOPS_GPU) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (begin + out.numel() * out.element_size()) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return out;
}

// The CUDA kernels hold one row in the registers of one warp.
inline void check_head_dim(const char* op, const char* name, const Tensor& x) {
#ifdef KVOPS_GPU
  KVOPS_CHECK(x.size(3) <= kMaxHeadDim, op, ": head_dim of ", name, " must be at most ", kMaxHeadDim, " on a GPU, got ",
              x.size(3));
#else
  (void)op, (void)name, (void)x;
#endif
}

#ifdef KVOPS_GPU
#ifdef KVOPS_CUDASIM
struct CurrentDevice {
  explicit CurrentDevice(const Tensor&) {}
  void* stream() const { return nullptr; }
};
#else
// Makes x's device current for its lifetime and looks up torch's current stream there.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Tensor& x) : guard_(x.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream_));
  }
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
};
#endif

// A call on the device of `first`. The workspace comes from torch's caching allocator.
class HostCall final : public Call {
 public:
  HostCall(const char* op, const Tensor& first) : Call(op), first_(first), device_(first) { stream = device_.stream(); }

  void* workspace(int64_t bytes) override {
    if (bytes == 0) return nullptr;
    memory_ = empty(op, first_, std::array{(bytes + 3) / 4}, ScalarType::Float);
    return memory_->mutable_data_ptr();
  }

 private:
  const Tensor& first_;
  CurrentDevice device_;
  OptionalTensor memory_;
};
#else
class HostCall final : public Call {
 public:
  HostCall(const char* op, const Tensor& first) : Call(op), first_(first) {
    threads = static_cast<int64_t>(torch::stable::get_num_threads());
    run = torch_parallel_for;
  }
  ~HostCall() { operator delete(memory_, std::align_val_t{64}); }
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  void* workspace(int64_t bytes) override {
    if (bytes == 0) return nullptr;
    memory_ = operator new(bytes, std::align_val_t{64}, std::nothrow);
    if (!memory_) throw OutOfMemory(op, bytes, first_);
    return memory_;
  }

 private:
  const Tensor& first_;
  void* memory_ = nullptr;
};
#endif

}  // namespace kvops
