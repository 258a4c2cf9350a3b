// The parameters of the memory probes (kvops._lib.probe_read, probe_copy, probe_pages).
#pragma once
#include <cstdint>

namespace kvops {

enum class Probe { simd_sum, four_accumulators, copy, stream, shift, pages };

struct ProbeParams {
  Probe kind;
  const char* source;
  char* target;  // null for reads
  int64_t bytes;
  float* sums;                      // one per worker, so that the compiler cannot drop the reads
  const int32_t* places = nullptr;  // Probe::pages: which pages to read, in order, of page_bytes each
  int64_t page_bytes = 0;           // a multiple of 256
};

}  // namespace kvops
