// build_prototypes: parameters, launcher.
#pragma once
#include "indices.h"

namespace kvops {

struct BuildPrototypesParams {
  KVView k;                // [b, Hk, n, d]
  IndexView sats;          // [b, Hk, p]: each in [-1, n), strictly ascending, -1 last; null data: no anchors
  const int32_t* buckets;  // [b, Hk, p]: each in [-1, num_buckets)
  float* prototypes;       // [b, Hk, num_chunks + num_buckets, d]
  int32_t* counts;         // [b, Hk, num_chunks + num_buckets]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d;
  int64_t num_chunks, num_buckets, least_chunk;

  KVOPS_HOST_DEVICE int64_t count() const { return num_chunks + num_buckets; }
  // The number of chunks that a row of `valid` tokens is cut into, with at least `least_chunk` tokens each unless the
  // row has fewer; the remaining chunks are empty. No row has 2^31 slots, so the division is one of 32 bits.
  KVOPS_HOST_DEVICE int64_t chunks(int64_t valid) const {
    const int64_t most =
        valid <= least_chunk ? valid > 0 : static_cast<uint32_t>(valid) / static_cast<uint32_t>(least_chunk);
    return num_chunks < most ? num_chunks : most;
  }
  // Chunk c of a row is [chunk_begin(c), chunk_begin(c + 1)) of its valid tokens, for c < chunks(valid).
  KVOPS_HOST_DEVICE int64_t chunk_begin(int64_t valid, int64_t c) const { return c * valid / chunks(valid); }
};

void launch_build_prototypes(const BuildPrototypesParams& p, Call& call);

}  // namespace kvops
