// ladder_gather: checks arguments, allocates outputs, launches.
#include "ladder_gather.h"

#include "../host.h"
#include "ladder_checks.h"

namespace kvops {
namespace {

constexpr const char* kLadderGather = "ladder_gather";

void gather(const Tensors& k, const LadderParams& p) {
  if (p.b * p.heads * p.moves.kept == 0) return;
  HostCall call(kLadderGather, k[0]);
  launch_ladder_gather(p, call);
}

std::tuple<Tensors, Tensors> ladder_gather(const Tensors& k, const Tensors& v, const Integers& plan,
                                           const Integers& layer, const OptionalTensor& inv_freq, bool interleaved) {
  CheckedLadder ladder = check_ladder(kLadderGather, k, v, plan, layer, inv_freq, interleaved, false);
  const LadderParams& p = ladder.params;
  Tensors k_out, v_out;
  for (size_t i = 0; i < k.size(); ++i) {
    k_out.push_back(empty_rows(kLadderGather, k[i], p.b, p.heads, p.moves.kept));
    v_out.push_back(empty_rows(kLadderGather, v[i], p.b, p.heads, p.moves.kept));
    ladder.layers[i].k_out = check_kv(kLadderGather, "k_out", k_out[i], true);
    ladder.layers[i].v_out = check_kv(kLadderGather, "v_out", v_out[i], true);
  }
  gather(k, p);
  return {k_out, v_out};
}

void ladder_gather_out(const Tensors& k, const Tensors& v, const Integers& plan, const Integers& layer,
                       const OptionalTensor& inv_freq, bool interleaved, const Tensors& k_out, const Tensors& v_out) {
  CheckedLadder ladder = check_ladder(kLadderGather, k, v, plan, layer, inv_freq, interleaved, false);
  KVOPS_CHECK(k_out.size() == k.size() && v_out.size() == k.size(), kLadderGather,
              ": k_out and v_out must hold one tensor for each of the ", k.size(), " layers, got ", k_out.size(),
              " and ", v_out.size());
  for (size_t i = 0; i < k.size(); ++i) {
    ladder.layers[i].k_out =
        check_target(kLadderGather, "k_out", k_out[i], k[i], k[i].size(0), ladder.params.moves.kept);
    ladder.layers[i].v_out =
        check_target(kLadderGather, "v_out", v_out[i], v[i], v[i].size(0), ladder.params.moves.kept);
  }
  std::vector<Named> written, read;
  add_named(written, "k_out", k_out);
  add_named(written, "v_out", v_out);
  add_named(read, "k", k);
  add_named(read, "v", v);
  if (inv_freq) read.push_back({"inv_freq", *inv_freq});
  check_written(kLadderGather, written, read);
  gather(k, ladder.params);
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("ladder_gather", TORCH_BOX(&ladder_gather));
  m.impl("ladder_gather.out", TORCH_BOX(&ladder_gather_out));
}

}  // namespace kvops
