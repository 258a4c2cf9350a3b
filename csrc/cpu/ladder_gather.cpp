// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/ladder_gather.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(ladder_gather, LadderParams)

namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

void run(const LadderParams& p) {
  const int64_t rows = p.num_layers * p.b * p.heads * p.moves.kept;
  if (rows == 0) return;
  const int64_t threads = threads_for(rows * (p.layers[0].k.row_bytes + p.layers[0].v.row_bytes));
  const Scratch scratch("ladder_gather", threads * ladder_scratch(p.rope));
  ladder_gather_cpu(p, scratch.workers(threads));
}

std::tuple<Tensors, Tensors> ladder_gather(const Tensors& k, const Tensors& v, const Integers& plan,
                                           const Integers& layer, const OptionalTensor& inv_freq, bool interleaved) {
  LadderCall call = check_ladder_gather(k, v, plan, layer, inv_freq, interleaved);
  const LadderParams& p = call.params;
  std::tuple<Tensors, Tensors> out;
  for (size_t i = 0; i < k.size(); ++i) {
    std::get<0>(out).push_back(empty_huge("ladder_gather", k[i], {p.b, p.heads, p.moves.kept, k[i].size(3)}));
    std::get<1>(out).push_back(empty_huge("ladder_gather", v[i], {p.b, p.heads, p.moves.kept, v[i].size(3)}));
  }
  set_ladder_gather_targets(k, v, std::get<0>(out), std::get<1>(out), call);
  run(p);
  return out;
}

void ladder_gather_out(const Tensors& k, const Tensors& v, const Integers& plan, const Integers& layer,
                       const OptionalTensor& inv_freq, bool interleaved, const Tensors& k_out, const Tensors& v_out) {
  LadderCall call = check_ladder_gather(k, v, plan, layer, inv_freq, interleaved);
  set_ladder_gather_targets(k, v, k_out, v_out, call);
  check_ladder_gather_memory(k, v, k_out, v_out, inv_freq);
  run(call.params);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("ladder_gather", TORCH_BOX(&ladder_gather));
  m.impl("ladder_gather.out", TORCH_BOX(&ladder_gather_out));
}

}  // namespace kvops
