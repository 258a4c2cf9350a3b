// Moving rows of whole 16-byte pieces, shared by gather_kv, compact_kv_ and the ladder.
#pragma once
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

// The rows of one (batch, head) of K or V, or some of their columns. Copied out of a KVView so that the compiler does
// not reload its fields after every store.
struct Strip {
  HeadRows rows;
  int64_t bytes;
  Strip(const KVView& x, int64_t b, int64_t h) : rows(x.head(b, h)), bytes(x.row_bytes) {}
  char* row(int64_t i) const { return rows.row(i); }
};

// Part `part` of the columns of x's rows, in whole cache lines; empty if there are fewer lines than parts.
inline Strip column_strip(const KVView& x, int64_t b, int64_t h, int64_t part, int64_t parts) {
  const Share lines = share((x.row_bytes + 63) / 64, part, parts);
  const int64_t first = lines.first * 64, last = lines.last * 64 < x.row_bytes ? lines.last * 64 : x.row_bytes;
  Strip strip(x, b, h);
  strip.rows.data += first;
  strip.bytes = first < last ? last - first : 0;
  return strip;
}

// An in-place move uses streaming stores if the destination is at least this far (bytes) from its source, and has
// therefore left the cache. Outputs in other memory use them from this size on.
constexpr int64_t kStreamedMove = 4 << 20, kStreamedOutput = 16 << 20;

// Kept rows are scattered, which the hardware prefetcher does not follow. The kernels prefetch about 8 KiB ahead
// themselves.
inline int64_t rows_ahead(int64_t bytes) {
  return bytes < 2048 ? 8192 / bytes : 4;
}

struct CopyRow {
  void operator()(char* to, const char* from, int64_t bytes) const {
    int64_t i = 0;
    for (; i + VB <= bytes; i += VB) {
      U x;
      memcpy(&x, from + i, VB);
      memcpy(to + i, &x, VB);
    }
    for (; i < bytes; i += 16) memcpy(to + i, from + i, 16);
  }
};

// Stores that bypass the cache avoid reading a line that is fully overwritten. They need vector-aligned rows.
#if defined(__AVX512F__)
#define KVOPS_STREAM(p, x) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)(x))
#elif defined(__AVX2__)
#define KVOPS_STREAM(p, x) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)(x))
#elif defined(__x86_64__)
#define KVOPS_STREAM(p, x) _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)(x))
#else
#define KVOPS_STREAM(p, x) memcpy(p, &(x), VB)
#endif

// Whether the rows of x can be written with streaming stores.
inline bool streamable(const KVView& x) {
  const auto aligned = [](int64_t bytes) { return bytes % VB == 0; };
  return aligned(reinterpret_cast<intptr_t>(x.data)) && aligned(x.stride_b) && aligned(x.stride_h) &&
         aligned(x.stride_n) && aligned(x.row_bytes);
}

struct StreamRow {
  void operator()(char* to, const char* from, int64_t bytes) const {
    for (int64_t i = 0; i < bytes; i += VB) {
      U x;
      memcpy(&x, from + i, VB);
      KVOPS_STREAM(to + i, x);
    }
  }
};

inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
