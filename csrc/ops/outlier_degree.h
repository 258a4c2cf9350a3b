// outlier_degree: parameters, launcher.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct OutlierDegreeParams {
  KVView k;       // [b, Hk, n, d]
  float* scores;  // [b, Hk, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d;
  int64_t kappa;
  bool standardize;  // otherwise return the similarity itself
};

constexpr int64_t kMaxKappa = 1024;

// Similarities that spread less than this count as equal: their differences are fp32 rounding.
constexpr float kFlatSimilarity = 1e-6f;

void launch_outlier_degree(const OutlierDegreeParams& p, Call& call);

}  // namespace kvops
