#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "gather_kv.cuh"

namespace kvops {
namespace {

void run(const Tensor& like, const Tensor& indices, const GatherKVParams& p) {
  check_index_values("gather_kv", indices, p.n);
  const OnDevice device(like);
  gather_kv_cuda(p, device.stream());
}

// A fresh contiguous [b, Hk, m, d] like `like`, and its rows.
Tensor fresh(const GatherKVParams& p, const Tensor& like, KVView& rows) {
  const Tensor out = empty("gather_kv", like, std::array{p.b, p.heads, p.indices.m, like.size(3)}, like.scalar_type());
  rows = check_kv("gather_kv", "out", out, true);
  return out;
}

std::tuple<Tensor, Tensor> gather_kv(const Tensor& k, const Tensor& v, const Tensor& indices) {
  GatherKVParams p = check_gather_kv(k, v, indices);
  std::tuple out{fresh(p, k, p.k_out), fresh(p, v, p.v_out)};
  run(k, indices, p);
  return out;
}

void gather_kv_out(const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& k_out, const Tensor& v_out) {
  GatherKVParams p = check_gather_kv(k, v, indices);
  check_gather_kv_targets(k, v, indices, k_out, v_out, p);
  run(k, indices, p);
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("gather_kv", TORCH_BOX(&gather_kv));
  m.impl("gather_kv.out", TORCH_BOX(&gather_kv_out));
}

}  // namespace kvops
