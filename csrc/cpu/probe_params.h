// What the memory probes are asked (kvops._lib.probe_read, probe_copy).
#pragma once
#include <cstdint>

namespace kvops {

enum class Probe { simd_sum, four_accumulators, copy, stream, shift };

struct ProbeParams {
  Probe kind;
  const char* source;
  char* target;  // null when only read
  int64_t bytes;
  float* sums;  // one per worker, so that the reads are not optimized away
};

}  // namespace kvops
