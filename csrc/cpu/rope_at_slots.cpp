// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/rope_at_slots.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(rope_at_slots, RopeAtSlotsParams)

namespace {

void run(const RopeAtSlotsParams& p) {
  const int64_t rows = p.b * p.heads * p.n;
  if (rows == 0) return;
  const Scratch none;
  rope_at_slots_cpu(p, none.workers(threads_for(rows * p.k.row_bytes)));
}

Tensor rope_at_slots(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  RopeAtSlotsParams p = check_rope_at_slots(k, cos, sin, interleaved);
  const Tensor out = empty_huge("rope_at_slots", k, {p.b, p.heads, p.n, k.size(3)});
  p.out = check_kv("rope_at_slots", "out", out, true);
  run(p);
  return out;
}

void rope_at_slots_out(const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out) {
  RopeAtSlotsParams p = check_rope_at_slots(k, cos, sin, interleaved);
  check_rope_at_slots_target(k, cos, sin, out, p);
  run(p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("rope_at_slots", TORCH_BOX(&rope_at_slots));
  m.impl("rope_at_slots.out", TORCH_BOX(&rope_at_slots_out));
}

}  // namespace kvops
