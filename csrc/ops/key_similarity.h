// key_similarity: parameters, launcher.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct KeySimilarityParams {
  KVView k;             // [b, Hk, n, d]
  const float* anchor;  // [b, Hk, d]: the sum of the unit keys
  float* scores;        // [b, Hk, n]: on entry minus the cosines with the anchor, as anchor_cosine returns them
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d;
  float threshold;  // at least 0; from 1 on, no pair of keys exceeds it
};

void launch_key_similarity(const KeySimilarityParams& p, Call& call);

}  // namespace kvops
