// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/ladder_compact_.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(ladder_compact_, LadderParams)

namespace {

void ladder_compact_(const std::vector<Tensor>& k, const std::vector<Tensor>& v, const std::vector<int64_t>& plan,
                     const std::vector<int64_t>& layer, const OptionalTensor& inv_freq, bool interleaved) {
  const LadderCall call = check_ladder_compact_(k, v, plan, layer, inv_freq, interleaved);
  const LadderParams& p = call.params;
  const int64_t rows = p.num_layers * p.b * p.heads * (p.moves.kept - p.moves.first);
  if (rows == 0) return;
  const int64_t threads = threads_for(rows * (p.layers[0].k.row_bytes + p.layers[0].v.row_bytes));
  const Scratch scratch("ladder_compact_", threads * ladder_scratch(p.rope));
  ladder_compact__cpu(p, scratch.workers(threads));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("ladder_compact_", TORCH_BOX(&ladder_compact_));
}

}  // namespace kvops
