// rope_at_slots: checks arguments, allocates the output, launches.
#include "rope_at_slots.h"

#include "../host.h"
#include "../overlap.h"
#include "rope_checks.h"

namespace kvops {
namespace {

constexpr const char* kRopeAtSlots = "rope_at_slots";

// The arguments that are read; the target follows later.
RopeAtSlotsParams check_read(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const DType dtype = check_dtype(kRopeAtSlots, "k", k);
  const KV kv = check_cache(kRopeAtSlots, "k", k, std::nullopt);
  return {.k = kv.view,
          .out = {},
          .rope = check_rope(kRopeAtSlots, kv, k, cos, sin, interleaved),
          .dtype = dtype,
          .b = kv.b,
          .heads = kv.heads,
          .n = kv.n};
}

void turn(const Tensor& k, const RopeAtSlotsParams& p) {
  if (k.numel() == 0) return;
  HostCall call(kRopeAtSlots, k);
  launch_rope_at_slots(p, call);
}

Tensor rope_at_slots(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  RopeAtSlotsParams p = check_read(k, cos, sin, interleaved);
  const Tensor out = empty_rows(kRopeAtSlots, k, p.b, p.heads, p.n);
  p.out = check_kv(kRopeAtSlots, "out", out, true);
  turn(k, p);
  return out;
}

// `out` is k itself, or memory that overlaps no input.
void rope_at_slots_out(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out) {
  RopeAtSlotsParams p = check_read(k, cos, sin, interleaved);
  p.out = check_target(kRopeAtSlots, "out", out, k, p.b, p.n);
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
