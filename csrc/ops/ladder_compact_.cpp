// ladder_compact_: checks arguments, launches.
#include "ladder_compact_.h"

#include "../host.h"
#include "ladder_checks.h"

namespace kvops {
namespace {

// Checks everything first, so a rejected call changes nothing.
void ladder_compact_(const Tensors& k, const Tensors& v, const Integers& plan, const Integers& layer,
                     const OptionalTensor& inv_freq, bool interleaved) {
  const char* op = "ladder_compact_";
  const CheckedLadder ladder = check_ladder(op, k, v, plan, layer, inv_freq, interleaved, true);
  std::vector<Named> written, read;
  add_named(written, "k", k);
  add_named(written, "v", v);
  if (inv_freq) read.push_back({"inv_freq", *inv_freq});
  check_written(op, written, read);
  const LadderParams& p = ladder.params;
  if (p.b * p.heads * (p.moves.kept - p.moves.first) == 0) return;
  HostCall call(op, k[0]);
  launch_ladder_compact_(p, call);
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("ladder_compact_", TORCH_BOX(&ladder_compact_));
}

}  // namespace kvops
