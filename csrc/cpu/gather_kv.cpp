// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/gather_kv.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(gather_kv, GatherKVParams)

namespace {

void run(const Tensor& indices, const GatherKVParams& p) {
  if (indices.numel() == 0) return;
  check_index_values("gather_kv", indices, p.n);
  const Scratch none;
  gather_kv_cpu(p, none.workers(threads_for(p.b * p.heads * p.indices.m * (p.k.row_bytes + p.v.row_bytes))));
}

// A fresh contiguous [b, Hk, m, d] like `like`, and its rows.
Tensor fresh(const GatherKVParams& p, const Tensor& like, KVView& rows) {
  const Tensor out = empty_huge("gather_kv", like, {p.b, p.heads, p.indices.m, like.size(3)});
  rows = check_kv("gather_kv", "out", out, true);
  return out;
}

std::tuple<Tensor, Tensor> gather_kv(const Tensor& k, const Tensor& v, const Tensor& indices) {
  GatherKVParams p = check_gather_kv(k, v, indices);
  std::tuple out{fresh(p, k, p.k_out), fresh(p, v, p.v_out)};
  run(indices, p);
  return out;
}

void gather_kv_out(const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& k_out, const Tensor& v_out) {
  GatherKVParams p = check_gather_kv(k, v, indices);
  check_gather_kv_targets(k, v, indices, k_out, v_out, p);
  run(indices, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("gather_kv", TORCH_BOX(&gather_kv));
  m.impl("gather_kv.out", TORCH_BOX(&gather_kv_out));
}

}  // namespace kvops
