// What the memory probes are asked (kvops._lib.probe_read, probe_copy, probe_pages).
#pragma once
#include <cstdint>

namespace kvops {

enum class Probe { simd_sum, four_accumulators, copy, stream, shift, pages };

struct ProbeParams {
  Probe kind;
  const char* source;
  char* target;  // null when only read
  int64_t bytes;
  float* sums;                      // one per worker, so that the reads are not optimized away
  const int32_t* places = nullptr;  // pages: of which pages to read, in order, each of page_bytes
  int64_t page_bytes = 0;           // a multiple of 256
};

}  // namespace kvops
