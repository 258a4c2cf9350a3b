// Moving rows of 16-byte multiples: what gather_kv and compact_kv_ share.
#pragma once
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

// Rows about this many bytes ahead are asked for early: kept rows jump, which the hardware's prefetch does not follow.
inline int64_t rows_ahead(int64_t row_bytes) {
  return row_bytes < 8192 / 4 ? 8192 / row_bytes : 4;
}

inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

inline void copy_row(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
  for (; i + VB <= bytes; i += VB) {
    U x;
    memcpy(&x, from + i, VB);
    memcpy(to + i, &x, VB);
  }
  for (; i < bytes; i += 16) memcpy(to + i, from + i, 16);
}

inline void zero_row(char* to, int64_t bytes) {
  memset(to, 0, bytes);
}

// Stores that bypass the cache save the read of a line that is written whole. Only for vector-aligned rows.
#if defined(__AVX512F__)
#define KVOPS_STREAM(p, x) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)(x))
#elif defined(__AVX2__)
#define KVOPS_STREAM(p, x) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)(x))
#elif defined(__x86_64__)
#define KVOPS_STREAM(p, x) _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)(x))
#else
#define KVOPS_STREAM(p, x) memcpy(p, &(x), VB)
#endif

// May the rows of x be written by streaming stores?
inline bool streamable(const KVView& x) {
  const auto aligned = [](int64_t bytes) { return bytes % VB == 0; };
  return aligned(reinterpret_cast<intptr_t>(x.data)) && aligned(x.stride_b) && aligned(x.stride_h) &&
         aligned(x.stride_n) && aligned(x.row_bytes);
}

inline void stream_row(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += VB) {
    U x;
    memcpy(&x, from + i, VB);
    KVOPS_STREAM(to + i, x);
  }
}

inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
