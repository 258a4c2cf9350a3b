// compact_kv_: checks, call.
#include "compact_kv_.h"

#include "../host.h"
#include "../overlap.h"

namespace kvops {
namespace {

// Every index is checked, so that a refused call changes nothing.
void compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const char* op = "compact_kv_";
  const KVPair kv = check_kv_pair(op, k, v, true);
  const IndexView view = check_indices(op, indices, k);
  KVOPS_CHECK(view.m <= kv.n, op, ": indices must keep at most the ", kv.n, " slots there are, got ", view.m);
  check_written(op, {{"k", k}, {"v", v}}, {{"indices", indices}});
  check_ascending_values(op, indices, kv.n);
  if (indices.numel() == 0) return;
  const CompactKVParams p{.k = kv.k, .v = kv.v, .indices = view, .b = kv.b, .heads = kv.heads, .n = kv.n};
  HostCall call(op, k);
  launch_compact_kv_(p, call);
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
