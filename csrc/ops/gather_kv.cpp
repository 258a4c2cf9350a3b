// gather_kv: checks arguments, allocates outputs, launches.
#include "gather_kv.h"

#include "../host.h"
#include "../overlap.h"

namespace kvops {
namespace {

constexpr const char* kGatherKV = "gather_kv";

// The arguments that are read; the targets follow later.
GatherKVParams check_sources(const Tensor& k, const Tensor& v, const Tensor& indices,
                             const OptionalTensor& block_table) {
  const KVPair kv = check_kv_pair(kGatherKV, k, v, block_table, check_moved_dtype);
  const IndexView view = check_indices(kGatherKV, indices, k, kv.k);
  return {.k = kv.k.view,
          .v = kv.v.view,
          .k_out = {},
          .v_out = {},
          .indices = view,
          .b = kv.k.b,
          .heads = kv.k.heads,
          .n = kv.k.n};
}

void gather(const Tensor& k, const Tensor& indices, const OptionalTensor& block_table, const GatherKVParams& p) {
  if (indices.numel() == 0) return;
  check_index_values(kGatherKV, indices, p.n);
  check_pages(kGatherKV, block_table, k, IndexRange(indices));
  HostCall call(kGatherKV, k);
  launch_gather_kv(p, call);
}

std::tuple<Tensor, Tensor> gather_kv(const Tensor& k, const Tensor& v, const Tensor& indices,
                                     const OptionalTensor& block_table) {
  GatherKVParams p = check_sources(k, v, indices, block_table);
  const Tensor k_out = empty_rows(kGatherKV, k, p.b, p.heads, p.indices.m);
  const Tensor v_out = empty_rows(kGatherKV, v, p.b, p.heads, p.indices.m);
  p.k_out = check_kv(kGatherKV, "k_out", k_out, true);
  p.v_out = check_kv(kGatherKV, "v_out", v_out, true);
  gather(k, indices, block_table, p);
  return {k_out, v_out};
}

void gather_kv_out(const Tensor& k, const Tensor& v, const Tensor& indices, const OptionalTensor& block_table,
                   const Tensor& k_out, const Tensor& v_out) {
  GatherKVParams p = check_sources(k, v, indices, block_table);
  p.k_out = check_target(kGatherKV, "k_out", k_out, k, p.b, p.indices.m);
  p.v_out = check_target(kGatherKV, "v_out", v_out, v, p.b, p.indices.m);
  std::vector<Named> read{{"k", k}, {"v", v}, {"indices", indices}};
  if (block_table) read.push_back({"block_table", *block_table});
  check_written(kGatherKV, {{"k_out", k_out}, {"v_out", v_out}}, read);
  gather(k, indices, block_table, p);
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("gather_kv", TORCH_BOX(&gather_kv));
  m.impl("gather_kv.out", TORCH_BOX(&gather_kv_out));
}

}  // namespace kvops
