// compact_kv_: checks, call.
#include "compact_kv_.h"

#include "../host.h"
#include "../overlap.h"

namespace kvops {
namespace {

// Every index is checked, so that a refused call changes nothing.
void compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices, const OptionalTensor& block_table) {
  const char* op = "compact_kv_";
  const KVPair kv = check_kv_pair(op, k, v, block_table, true);
  const auto& [k_view, b, heads, n, d] = kv.k;
  const IndexView view = check_indices(op, indices, k, kv.k);
  KVOPS_CHECK(view.m <= n, op, ": indices must keep at most the ", n, " slots there are, got ", view.m);
  std::vector<Named> read{{"indices", indices}};
  if (block_table) read.push_back({"block_table", *block_table});
  check_written(op, {{"k", k}, {"v", v}}, read);
  check_ascending_values(op, indices, n);
  const IndexRange range(indices);
  check_pages(op, block_table, k, [&](int64_t i) { return SlotRange{0, range(i).last}; }, true);
  if (indices.numel() == 0) return;
  const CompactKVParams p{.k = k_view, .v = kv.v.view, .indices = view, .b = b, .heads = heads, .n = n};
  HostCall call(op, k);
  launch_compact_kv_(p, call);
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
