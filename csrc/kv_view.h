// How every kernel addresses rows: plain structs without a torch header, shared by the CPU and the CUDA kernels.
#pragma once

#include <cstdint>

namespace kvops {

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

#ifdef __CUDACC__
  __host__ __device__
#endif
      char* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride_b + h * stride_h + i * stride_n;
  }
};

// Which slots of a padded batch hold tokens: row b's are [first(b), first(b) + count(b)).
struct ValidSlots {
  const int32_t* starts;   // [b] or null: 0
  const int32_t* lengths;  // [b] or null: n - starts
  int64_t n;

#ifdef __CUDACC__
  __host__ __device__
#endif
      int64_t first(int64_t b) const {
    return starts ? starts[b] : 0;
  }
#ifdef __CUDACC__
  __host__ __device__
#endif
      int64_t count(int64_t b) const {
    return lengths ? lengths[b] : n - first(b);
  }
};

}  // namespace kvops
