// anchor_cosine: parameters, launcher.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct AnchorCosineParams {
  KVView k;                   // [b, Hk, n, d]
  const float* given_anchor;  // [b, Hk, d] or null
  float* anchor;              // [b, Hk, d]: the computed sum, or a copy of the given one
  float* scores;              // [b, Hk, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d;
  bool normalize_anchor;
};

void launch_anchor_cosine(const AnchorCosineParams& p, Call& call);

}  // namespace kvops
