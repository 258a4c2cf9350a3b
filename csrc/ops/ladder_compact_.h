// ladder_compact_: checks. The plan and the parameters are ladder.h's.
#pragma once
#include "ladder.h"

#ifdef KVOPS_CHECKS
namespace kvops {

// All is checked, so that a refused call changes nothing.
inline LadderCall check_ladder_compact_(const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                                        const std::vector<int64_t>& plan, const std::vector<int64_t>& layer,
                                        const OptionalTensor& inv_freq, bool interleaved) {
  const char* op = "ladder_compact_";
  LadderCall call = check_ladder(op, k, v, plan, layer, inv_freq, interleaved, true);
  std::vector<Named> written, read;
  add_named(written, "k", k);
  add_named(written, "v", v);
  if (inv_freq) read.push_back({"inv_freq", *inv_freq});
  check_written(op, written, read);
  return call;
}

}  // namespace kvops
#endif
