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
// Indices in [-1, n), strictly ascending, -1 only at the end. Collected like check_index_values.
inline void check_ascending_values(const char* op, const Tensor& indices, int64_t n) {
  for_index_rows(indices, [&](const int64_t* row, int64_t stride, int64_t m, int64_t b, int64_t h) {
    int64_t kept = m;
    while (kept > 0 && row[(kept - 1) * stride] == -1) --kept;
    int64_t wrong = 0;
    for (int64_t i = 1; i < kept; ++i) wrong |= row[i * stride] <= row[(i - 1) * stride] ? -1 : row[(i - 1) * stride];
    if (kept) wrong |= row[0] | (n - 1 - row[(kept - 1) * stride]);
    int64_t last = -1;
    for (int64_t i = 0; wrong < 0 && i < kept; ++i) {
      const int64_t index = row[i * stride];
      KVOPS_CHECK(index >= -1 && index < n, op, ": indices must lie in [-1, ", n, "), got ", index, " at row ", b,
                  ", head ", h, ", entry ", i);
      KVOPS_CHECK(index > last, op, ": indices must ascend strictly with -1 only at the end, got ", index, " after ",
                  last, " at row ", b, ", head ", h, ", entry ", i);
      last = index;
    }
  });
}

// Every index is checked, so that a refused call changes nothing.
inline CompactKVParams check_compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const char* op = "compact_kv_";
  const KVPair kv = check_kv_pair(op, k, v, true);
  const IndexView view = check_indices(op, indices, k);
  KVOPS_CHECK(view.m <= kv.n, op, ": indices must keep at most the ", kv.n, " slots there are, got ", view.m);
  check_target(op, "k", k, "v", v);
  check_target(op, "v", v, "k", k);
  check_ascending_values(op, indices, kv.n);
  return {.k = kv.k, .v = kv.v, .indices = view, .b = kv.b, .heads = kv.heads, .n = kv.n};
}
#endif

}  // namespace kvops
