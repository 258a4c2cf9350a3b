// outlier_degree: parameters, checks, output shape.
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
  bool standardize;  // else the similarity itself
};

constexpr int64_t kMaxKappa = 1024;

// Similarities that spread less than this are all alike: their differences are fp32's rounding.
constexpr float kFlatSimilarity = 1e-6f;

// How a CPU call cuts its work, and its scratch in floats: fp64 moments of each block (three), and for each worker two
// rows and the inverse norms around a block.
struct OutlierScratch {
  int64_t tokens, blocks;  // in a block; of a head
  int64_t moments, row, worker;

  explicit OutlierScratch(const OutlierDegreeParams& p) {
    tokens = (128 + 8 * p.kappa + 15) / 16 * 16;
    blocks = (p.n + tokens - 1) / tokens;
    moments = (6 * p.b * p.heads * blocks + 15) / 16 * 16;
    row = (p.d + 31) / 32 * 32;
    worker = 2 * row + (1 + tokens + 2 * p.kappa + 16 + 15) / 16 * 16;
  }
};

#ifdef KVOPS_CHECKS
inline OutlierDegreeParams check_outlier_degree(const Tensor& k, int64_t kappa, bool standardize,
                                                const OptionalTensor& starts, const OptionalTensor& lengths,
                                                Tensor& scores) {
  const char* op = "outlier_degree";
  const DType dtype = check_dtype(op, "k", k);
  const KVView view = check_kv(op, "k", k);
  const int64_t b = k.size(0), heads = k.size(1), n = k.size(2);
  KVOPS_CHECK(kappa >= 1 && kappa <= kMaxKappa, op, ": kappa must be in [1, ", kMaxKappa, "], got ", kappa);
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  scores = empty(op, k, std::array{b, heads, n}, ScalarType::Float);
  return {.k = view,
          .scores = static_cast<float*>(scores.mutable_data_ptr()),
          .dtype = dtype,
          .slots = slots,
          .b = b,
          .heads = heads,
          .n = n,
          .d = k.size(3),
          .kappa = kappa,
          .standardize = standardize};
}
#endif

}  // namespace kvops
