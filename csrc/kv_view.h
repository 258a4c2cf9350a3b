// How every kernel addresses rows: plain structs without a torch header, shared by the CPU and the CUDA kernels.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVOPS_HOST_DEVICE __host__ __device__
#else
#define KVOPS_HOST_DEVICE
#endif

namespace kvops {

struct Call;  // call.h

constexpr int64_t kMaxHeadDim = 1024;  // of the CUDA kernels: one warp holds a row in registers

enum class DType : int32_t { f32, f16, bf16 };

// fp16 and bf16 as stored: 2 bytes, converted to float wherever they are computed with.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// K or V, [b, Hk, n, d], the last dim contiguous: BHND, BNHD and slices of wider tensors are all strides.
struct KVView {
  char* data;
  int64_t stride_b, stride_h, stride_n;  // bytes
  int64_t row_bytes;                     // d * itemsize, a multiple of 16

  KVOPS_HOST_DEVICE char* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride_b + h * stride_h + i * stride_n;
  }
};

// Which slots of a padded batch hold tokens: row b's are [first(b), first(b) + count(b)). What lies on a GPU is not
// checked on the host, so values out of range are clamped to [0, n] here.
struct ValidSlots {
  const int32_t* starts;   // [b] or null: 0
  const int32_t* lengths;  // [b] or null: n - starts
  int64_t n;

  KVOPS_HOST_DEVICE int64_t first(int64_t b) const { return starts ? clamped(starts[b], n) : 0; }
  KVOPS_HOST_DEVICE int64_t count(int64_t b) const {
    const int64_t most = n - first(b);
    return lengths ? clamped(lengths[b], most) : most;
  }

 private:
  KVOPS_HOST_DEVICE static int64_t clamped(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }
};

}  // namespace kvops
