// Checks of the cos and sin tables. Shared by rope_at_slots and window_attention, so that both report errors in the
// same words. k has been checked already.
#pragma once
#include "../check.h"
#include "rope.h"

namespace kvops {

inline SlotRope check_rope(const char* op, const KV& kv, const Tensor& k, const Tensor& cos, const Tensor& sin,
                           bool interleaved) {
  check_same_device(op, "cos", cos, k);
  check_same_device(op, "sin", sin, k);
  check_scalar_type(op, "cos", cos, ScalarType::Float);
  check_scalar_type(op, "sin", sin, ScalarType::Float);
  const int64_t b = kv.b, n = kv.n, d = kv.d;
  int64_t pairs = 0;
  const auto table = [&](const char* name, const Tensor& x) -> AngleTable {
    const int64_t dims = x.dim(), rows = dims >= 2 ? x.size(dims - 2) : 0;
    pairs = dims >= 2 ? x.size(dims - 1) : 0;
    KVOPS_CHECK((dims == 2 || (dims == 3 && x.size(0) == b)) && rows == n && 1 <= pairs && 2 * pairs <= d, op, ": ",
                name, " must be float32 [", n, ", pairs] or [", b, ", ", n,
                ", pairs] with 2 * pairs at most the head_dim ", d, ", got ", shape(x));
    KVOPS_CHECK(x.stride(dims - 1) == 1 || pairs == 1, op, ": ", name, " must have a contiguous last dim, got stride ",
                x.stride(dims - 1));
    return {static_cast<const float*>(x.const_data_ptr()), dims == 3 ? x.stride(0) : 0, x.stride(dims - 2)};
  };
  const AngleTable cosines = table("cos", cos);
  const int64_t cos_pairs = pairs;
  const AngleTable sines = table("sin", sin);
  KVOPS_CHECK(pairs == cos_pairs, op, ": sin must have the shape of cos ", shape(cos), ", got ", shape(sin));
  return {cosines, sines, pairs, interleaved};
}

}  // namespace kvops
