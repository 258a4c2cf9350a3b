// Checks of per-head coefficients, shared by trig_scores and quadratic_scores.
#pragma once
#include "../check.h"
#include "trig_scores.h"

namespace kvops {

// x must be a contiguous fp32 [Hq, sizes...] or [b, Hq, sizes...] on k's device. Returns Hq and the batch stride.
struct PerHead {
  int64_t heads, stride_b;
  const float* data;
};
template <size_t N>
PerHead check_per_head(const char* op, const char* name, const Tensor& x, const Tensor& k, const KV& kv,
                       const std::array<int64_t, N>& sizes, int64_t heads = 0) {
  check_same_device(op, name, x, k);
  check_scalar_type(op, name, x, ScalarType::Float);
  const int64_t dims = x.dim(), batched = dims == static_cast<int64_t>(N) + 2;
  std::string rest;
  int64_t each = 1;
  bool fits = batched || dims == static_cast<int64_t>(N) + 1;
  for (size_t i = 0; i < N; ++i) {
    rest += ", " + std::to_string(sizes[i]);
    each *= sizes[i];
    fits = fits && x.size(dims - static_cast<int64_t>(N) + static_cast<int64_t>(i)) == sizes[i];
  }
  fits = fits && (!batched || x.size(0) == kv.b) && x.is_contiguous();
  const int64_t found = fits ? x.size(batched) : 0;
  const std::string wanted = heads ? std::to_string(heads) : "Hq";
  KVOPS_CHECK(fits && (!heads || found == heads), op, ": ", name, " must be a contiguous [", wanted, rest, "] or [",
              kv.b, ", ", wanted, rest, "], got ", shape(x));
  KVOPS_CHECK(heads || (found >= kv.heads && kv.heads >= 1 && found % kv.heads == 0) || found == kv.heads, op, ": ",
              name, " must have a multiple of k's ", kv.heads, " heads, got ", found);
  return {found, batched ? found * each : 0, static_cast<const float*>(x.const_data_ptr())};
}

}  // namespace kvops
