// lsh_bucket: parameters, launcher.
#pragma once
#include "indices.h"

namespace kvops {

struct LshBucketParams {
  KVView k;                 // [b, Hk, n, d]
  IndexView indices;        // [b, Hk, p], each in [-1, n)
  const float* projection;  // [r, d]
  const float* phase;       // [r]
  int32_t* buckets;         // [b, Hk, p]
  DType dtype;
  int64_t b, heads, n, d, r;
};

constexpr int64_t kMaxHashBits = 30;

// Whether the cosine of x, a finite number, is positive. No cosine is computed, so every device gives the same answer.
// Beyond 2^53 turns, neighbouring doubles are whole turns apart.
KVOPS_HOST_DEVICE inline bool cosine_is_positive(double x) {
  const double turns = x * 0.15915494309189535;  // 1 / (2 pi)
  if (!(turns > -0x1p53 && turns < 0x1p53)) return true;
  const double past = turns - static_cast<double>(static_cast<int64_t>(turns));  // in (-1, 1)
  const double distance = past < 0 ? -past : past;
  return distance < 0.25 || distance > 0.75;
}

void launch_lsh_bucket(const LshBucketParams& p, Call& call);

}  // namespace kvops
