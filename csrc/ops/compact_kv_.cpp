// compact_kv_: checks arguments, launches.
#include "compact_kv_.h"

#include "../host.h"
#include "layers.h"

namespace kvops {
namespace {

// Checks every index of every layer first, so a rejected call changes nothing.
void compact_kv_(const Tensors& k, const Tensors& v, const Tensors& indices, const OptionalTensor& block_table) {
  const char* op = "compact_kv_";
  const std::vector<KVPair> checked = check_layers(op, k, v, block_table, check_moved_dtype, true);
  KVOPS_CHECK(k.size() == indices.size(), op, ": k and indices must have one tensor per layer, got ", k.size(), " and ",
              indices.size());
  const auto& [_, b, heads, n, d] = checked[0].k;
  std::vector<CompactKVLayer> layers;
  int64_t most = 0;
  for (size_t i = 0; i < checked.size(); ++i) {
    layers.push_back({checked[i].k.view, checked[i].v.view, check_indices(op, indices[i], k[i], checked[i].k)});
    const int64_t m = layers[i].indices.m;
    KVOPS_CHECK(m <= n, op, ": indices must keep at most the cache's ", n, " slots, got ", m);
    most = std::max(most, m);
  }
  std::vector<Named> written, read;
  add_named(written, "k", k);
  add_named(written, "v", v);
  add_named(read, "indices", indices);
  if (block_table) read.push_back({"block_table", *block_table});
  check_written(op, written, read);
  for (size_t i = 0; i < layers.size(); ++i) {
    check_ascending_values(op, indices[i], n);
    const IndexRange range(indices[i]);
    check_pages(op, block_table, k[i], [&](int64_t row) { return SlotRange{0, range(row).last}; }, true);
  }
  if (b * heads * most == 0) return;
  HostCall call(op, k[0]);
  launch_compact_kv_({layers.data(), static_cast<int64_t>(layers.size()), b, heads, n}, call);
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
