// rope_at_slots: parameters and checks.
#pragma once
#include "../kv_view.h"

namespace kvops {

// A row's cosines or sines, fp32 [b, n, pairs] of any strides but the last.
struct AngleTable {
  const float* data;
  int64_t stride_b, stride_n;  // elements

  KVOPS_HOST_DEVICE const float* row(int64_t b, int64_t i) const { return data + b * stride_b + i * stride_n; }
};

struct RopeAtSlotsParams {
  KVView k, out;  // [b, Hk, n, d]; out may be k
  AngleTable cos, sin;
  int64_t pairs;     // channels 2 * pairs and above stay
  bool interleaved;  // pair i is channels 2 i, 2 i + 1 (GPT-J), else i, i + pairs (NeoX)
  DType dtype;
  int64_t b, heads, n;
};

#ifdef KVOPS_CHECKS
inline RopeAtSlotsParams check_rope_at_slots(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const char* op = "rope_at_slots";
  check_same_device(op, "cos", cos, k);
  check_same_device(op, "sin", sin, k);
  const DType dtype = check_dtype(op, "k", k);
  check_scalar_type(op, "cos", cos, ScalarType::Float);
  check_scalar_type(op, "sin", sin, ScalarType::Float);
  const KVView view = check_kv(op, "k", k);
  const int64_t b = k.size(0), n = k.size(2), d = k.size(3);
  int64_t pairs = 0;
  const auto table = [&](const char* name, const Tensor& x) -> AngleTable {
    const int64_t dims = x.dim(), rows = dims >= 2 ? x.size(dims - 2) : 0;
    pairs = dims >= 2 ? x.size(dims - 1) : 0;
    KVOPS_CHECK((dims == 2 || (dims == 3 && x.size(0) == b)) && rows == n && 1 <= pairs && 2 * pairs <= d, op, ": ",
                name, " must be fp32 [", n, ", pairs] or [", b, ", ", n,
                ", pairs] with 2 * pairs at most the head_dim ", d, ", got ", shape(x));
    KVOPS_CHECK(x.stride(dims - 1) == 1 || pairs == 1, op, ": ", name, " must have a contiguous last dim, got stride ",
                x.stride(dims - 1));
    return {static_cast<const float*>(x.const_data_ptr()), dims == 3 ? x.stride(0) : 0, x.stride(dims - 2)};
  };
  const AngleTable cosines = table("cos", cos);
  const int64_t cos_pairs = pairs;
  const AngleTable sines = table("sin", sin);
  KVOPS_CHECK(pairs == cos_pairs, op, ": sin must have the shape of cos ", shape(cos), ", got ", shape(sin));
  return {.k = view,
          .out = {},
          .cos = cosines,
          .sin = sines,
          .pairs = pairs,
          .interleaved = interleaved,
          .dtype = dtype,
          .b = b,
          .heads = k.size(1),
          .n = n};
}

// `out`: of k's shape and dtype; k itself, or memory that none of the inputs shares.
inline void check_rope_at_slots_target(const Tensor& k, const Tensor& cos, const Tensor& sin, const Tensor& out,
                                       RopeAtSlotsParams& p) {
  const char* op = "rope_at_slots";
  check_same_device(op, "out", out, k);
  KVOPS_CHECK(out.scalar_type() == k.scalar_type(), op, ": out must have k's dtype ",
              torch::headeronly::toString(k.scalar_type()), ", got ", torch::headeronly::toString(out.scalar_type()));
  p.out = check_kv(op, "out", out, true);
  bool same = out.const_data_ptr() == k.const_data_ptr();
  for (int i = 0; i < 4; ++i) {
    KVOPS_CHECK(out.size(i) == k.size(i), op, ": out must have k's shape ", shape(k), ", got ", shape(out));
    same = same && (out.stride(i) == k.stride(i) || out.size(i) <= 1);
  }
  std::vector<Named> read{{"cos", cos}, {"sin", sin}};
  if (!same) read.push_back({"k", k});
  check_written(op, {{"out", out}}, read);
}
#endif

}  // namespace kvops
