// compact_kv_: parameters and checks.
#pragma once
#include "gather_kv.h"

namespace kvops {

struct CompactKVParams {
  KVView k, v;        // [b, Hk, n, d], [b, Hk, n, dv], read and written
  IndexView indices;  // [b, Hk, m], strictly ascending, -1 only at the end
  int64_t b, heads, n;
};

#ifdef KVOPS_CHECKS
// Every index is checked, so that a refused call changes nothing.
inline CompactKVParams check_compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const char* op = "compact_kv_";
  const KVPair kv = check_kv_pair(op, k, v, true);
  const IndexView view = check_indices(op, indices, k);
  KVOPS_CHECK(view.m <= kv.n, op, ": indices must keep at most the ", kv.n, " slots there are, got ", view.m);
  check_written(op, {{"k", k}, {"v", v}}, {{"indices", indices}});
  check_ascending_values(op, indices, kv.n);
  return {.k = kv.k, .v = kv.v, .indices = view, .b = kv.b, .heads = kv.heads, .n = kv.n};
}
#endif

}  // namespace kvops
