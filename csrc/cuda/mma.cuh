// Tensor cores: products of 16-bit and tf32 numbers accumulated in fp32, and loading and transposing their operands.
//
// With r = l / 4 and c = l % 4, lane l of a warp holds two adjacent 16-bit elements of a matrix per register:
//   A [16, 16]: a0: row r, a1: row r + 8, columns 2c, 2c + 1;  a2, a3: the same rows, columns 2c + 8, 2c + 9
//   B [16, 8]:  b0: rows 2c, 2c + 1 of column r;  b1: rows 2c + 8, 2c + 9 of column r
// or one of tf32:
//   A [16, 8]:  a0: row r, a1: row r + 8, column c;  a2, a3: the same rows, column c + 4
//   B [8, 8]:   b0: row c of column r;  b1: row c + 4 of column r
// and of the result
//   D [16, 8]:  d[0], d[1]: row r, columns 2c, 2c + 1;  d[2], d[3]: row r + 8
#pragma once
#include "../kv_view.h"
#include "device.cuh"

namespace kvops {
namespace {

// D += A B; called by all lanes of the warp. T is Half or BFloat16.
template <class T>
__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1);
#ifdef __CUDACC__
#define KVOPS_MMA(T, type)                                                                                      \
  template <>                                                                                                   \
  __device__ inline void mma<T>(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                                unsigned b1) {                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                         \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                         \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                               \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                       \
  }
#else
#define KVOPS_MMA(T, type)                                                                                          \
  template <>                                                                                                       \
  inline void mma<T>(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { \
    cudasim::mma_m16n8k16(type, d, {a0, a1, a2, a3}, {b0, b1});                                                     \
  }
#endif
KVOPS_MMA(Half, "f16")
KVOPS_MMA(BFloat16, "bf16")
#undef KVOPS_MMA

// The 11 leading significant bits of x: what tf32 holds. Volatile: outside of a loop, parts would take registers.
__device__ inline float tf32_part(float x) {
#ifdef __CUDACC__
  unsigned y;
  asm volatile("and.b32 %0, %1, 0xffffe000;" : "=r"(y) : "r"(__float_as_uint(x)));
  return __uint_as_float(y);
#else
  return __uint_as_float(__float_as_uint(x) & 0xffffe000);
#endif
}

// D += A B for tf32. Bits of an element that tf32 does not hold may or may not count.
__device__ inline void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
#else
  cudasim::mma_m16n8k8_tf32(d, {a0, a1, a2, a3}, {b0, b1});
#endif
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane 8 m + i passes the address of row i (16 bytes) of matrix m. A lane
// gets, from each matrix, columns 2c, 2c + 1 of row r in one register; transposed, rows 2c, 2c + 1 of column r.
template <bool kTransposed>
__device__ inline void load_matrices(unsigned (&x)[4], const void* row) {
#ifdef __CUDACC__
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
#else
  cudasim::ldmatrix_x4(x, row, kTransposed);
#endif
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which a lane holds columns 2c, 2c + 1 of row r before and after.
__device__ inline unsigned transpose_matrix(unsigned x) {
#ifdef __CUDACC__
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#else
  return cudasim::movmatrix_trans(x);
#endif
}

}  // namespace
}  // namespace kvops
