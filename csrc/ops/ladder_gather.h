// ladder_gather: checks of the outputs. The plan and the parameters are ladder.h's.
#pragma once
#include "ladder.h"

#ifdef KVOPS_CHECKS
namespace kvops {

inline LadderCall check_ladder_gather(const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                                      const std::vector<int64_t>& plan, const std::vector<int64_t>& layer,
                                      const OptionalTensor& inv_freq, bool interleaved) {
  return check_ladder("ladder_gather", k, v, plan, layer, inv_freq, interleaved, false);
}

// Outputs of the right shapes, as views in the call. Fresh ones need no `check_ladder_gather_memory`.
inline void set_ladder_gather_targets(const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                                      const std::vector<Tensor>& k_out, const std::vector<Tensor>& v_out,
                                      LadderCall& call) {
  const char* op = "ladder_gather";
  KVOPS_CHECK(k_out.size() == k.size() && v_out.size() == k.size(), op,
              ": k_out and v_out must hold one tensor for each of the ", k.size(), " layers, got ", k_out.size(),
              " and ", v_out.size());
  const auto target = [&](const char* name, const Tensor& out, const Tensor& like) {
    check_same_device(op, name, out, k[0]);
    KVOPS_CHECK(out.scalar_type() == k[0].scalar_type(), op, ": ", name, " must have k's dtype ",
                torch::headeronly::toString(k[0].scalar_type()), ", got ",
                torch::headeronly::toString(out.scalar_type()));
    const KVView view = check_kv(op, name, out, true);
    const LadderParams& p = call.params;
    KVOPS_CHECK(
        out.size(0) == p.b && out.size(1) == p.heads && out.size(2) == p.moves.kept && out.size(3) == like.size(3), op,
        ": ", name, " must be [", p.b, ", ", p.heads, ", ", p.moves.kept, ", ", like.size(3), "], got ", shape(out));
    return view;
  };
  for (size_t i = 0; i < k.size(); ++i) {
    call.layers[i].k_out = target("k_out", k_out[i], k[i]);
    call.layers[i].v_out = target("v_out", v_out[i], v[i]);
  }
}

inline void check_ladder_gather_memory(const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                                       const std::vector<Tensor>& k_out, const std::vector<Tensor>& v_out,
                                       const OptionalTensor& inv_freq) {
  std::vector<Named> written, read;
  add_named(written, "k_out", k_out);
  add_named(written, "v_out", v_out);
  add_named(read, "k", k);
  add_named(read, "v", v);
  if (inv_freq) read.push_back({"inv_freq", *inv_freq});
  check_written("ladder_gather", written, read);
}

}  // namespace kvops
#endif
