// rope_at_slots: checks, output, call.
#include "rope_at_slots.h"

#include "../host.h"
#include "../overlap.h"

namespace kvops {
namespace {

constexpr const char* kRopeAtSlots = "rope_at_slots";

// What is read, before the target is known.
RopeAtSlotsParams check_rope(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_same_device(kRopeAtSlots, "cos", cos, k);
  check_same_device(kRopeAtSlots, "sin", sin, k);
  const DType dtype = check_dtype(kRopeAtSlots, "k", k);
  check_scalar_type(kRopeAtSlots, "cos", cos, ScalarType::Float);
  check_scalar_type(kRopeAtSlots, "sin", sin, ScalarType::Float);
  const KVView view = check_kv(kRopeAtSlots, "k", k);
  const int64_t b = k.size(0), n = k.size(2), d = k.size(3);
  int64_t pairs = 0;
  const auto table = [&](const char* name, const Tensor& x) -> AngleTable {
    const int64_t dims = x.dim(), rows = dims >= 2 ? x.size(dims - 2) : 0;
    pairs = dims >= 2 ? x.size(dims - 1) : 0;
    KVOPS_CHECK((dims == 2 || (dims == 3 && x.size(0) == b)) && rows == n && 1 <= pairs && 2 * pairs <= d, kRopeAtSlots,
                ": ", name, " must be fp32 [", n, ", pairs] or [", b, ", ", n,
                ", pairs] with 2 * pairs at most the head_dim ", d, ", got ", shape(x));
    KVOPS_CHECK(x.stride(dims - 1) == 1 || pairs == 1, kRopeAtSlots, ": ", name,
                " must have a contiguous last dim, got stride ", x.stride(dims - 1));
    return {static_cast<const float*>(x.const_data_ptr()), dims == 3 ? x.stride(0) : 0, x.stride(dims - 2)};
  };
  const AngleTable cosines = table("cos", cos);
  const int64_t cos_pairs = pairs;
  const AngleTable sines = table("sin", sin);
  KVOPS_CHECK(pairs == cos_pairs, kRopeAtSlots, ": sin must have the shape of cos ", shape(cos), ", got ", shape(sin));
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

void turn(const Tensor& k, const RopeAtSlotsParams& p) {
  if (k.numel() == 0) return;
  HostCall call(kRopeAtSlots, k);
  launch_rope_at_slots(p, call);
}

Tensor rope_at_slots(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  RopeAtSlotsParams p = check_rope(k, cos, sin, interleaved);
  const Tensor out = empty_rows(kRopeAtSlots, k, p.b, p.heads, p.n);
  p.out = check_kv(kRopeAtSlots, "out", out, true);
  turn(k, p);
  return out;
}

// `out` is k itself, or memory that none of the inputs shares.
void rope_at_slots_out(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out) {
  RopeAtSlotsParams p = check_rope(k, cos, sin, interleaved);
  p.out = check_target(kRopeAtSlots, "out", out, k, p.n);
  bool same = out.const_data_ptr() == k.const_data_ptr();
  for (int i = 0; i < 4; ++i) same = same && (out.stride(i) == k.stride(i) || out.size(i) <= 1);
  std::vector<Named> read{{"cos", cos}, {"sin", sin}};
  if (!same) read.push_back({"k", k});
  check_written(kRopeAtSlots, {{"out", out}}, read);
  turn(k, p);
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("rope_at_slots", TORCH_BOX(&rope_at_slots));
  m.impl("rope_at_slots.out", TORCH_BOX(&rope_at_slots_out));
}

}  // namespace kvops
