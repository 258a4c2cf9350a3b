#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "rope_at_slots.cuh"

namespace kvops {
namespace {

void run(const Tensor& k, const RopeAtSlotsParams& p) {
  const OnDevice device(k);
  rope_at_slots_cuda(p, device.stream());
}

Tensor rope_at_slots(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  RopeAtSlotsParams p = check_rope_at_slots(k, cos, sin, interleaved);
  const Tensor out = empty("rope_at_slots", k, std::array{p.b, p.heads, p.n, k.size(3)}, k.scalar_type());
  p.out = check_kv("rope_at_slots", "out", out, true);
  run(k, p);
  return out;
}

void rope_at_slots_out(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out) {
  RopeAtSlotsParams p = check_rope_at_slots(k, cos, sin, interleaved);
  check_rope_at_slots_target(k, cos, sin, out, p);
  run(k, p);
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("rope_at_slots", TORCH_BOX(&rope_at_slots));
  m.impl("rope_at_slots.out", TORCH_BOX(&rope_at_slots_out));
}

}  // namespace kvops
