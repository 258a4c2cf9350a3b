// gather_kv: parameters, checks, output shapes.
#pragma once
#include "../kv_view.h"
#include "indices.h"

namespace kvops {

struct GatherKVParams {
  KVView k, v;          // [b, Hk, n, d], [b, Hk, n, dv]
  KVView k_out, v_out;  // [b, Hk, m, d], [b, Hk, m, dv]
  IndexView indices;    // [b, Hk, m], each in [-1, n)
  int64_t b, heads, n;
};

#ifdef KVOPS_CHECKS
// What is read, before the targets are known.
inline GatherKVParams check_gather_kv(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const KVPair kv = check_kv_pair("gather_kv", k, v);
  const IndexView view = check_indices("gather_kv", indices, k);
  return {.k = kv.k, .v = kv.v, .k_out = {}, .v_out = {}, .indices = view, .b = kv.b, .heads = kv.heads, .n = kv.n};
}

inline void check_gather_kv_targets(const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& k_out,
                                    const Tensor& v_out, GatherKVParams& p) {
  const char* op = "gather_kv";
  const auto target = [&](const char* name, const Tensor& out, const Tensor& like) {
    check_same_device(op, name, out, k);
    KVOPS_CHECK(out.scalar_type() == k.scalar_type(), op, ": ", name, " must have k's dtype ",
                torch::headeronly::toString(k.scalar_type()), ", got ", torch::headeronly::toString(out.scalar_type()));
    const KVView view = check_kv(op, name, out, true);
    KVOPS_CHECK(
        out.size(0) == p.b && out.size(1) == p.heads && out.size(2) == p.indices.m && out.size(3) == like.size(3), op,
        ": ", name, " must be [", p.b, ", ", p.heads, ", ", p.indices.m, ", ", like.size(3), "], got ", shape(out));
    return view;
  };
  p.k_out = target("k_out", k_out, k);
  p.v_out = target("v_out", v_out, v);
  check_written(op, {{"k_out", k_out}, {"v_out", v_out}}, {{"k", k}, {"v", v}, {"indices", indices}});
}
#endif

}  // namespace kvops
