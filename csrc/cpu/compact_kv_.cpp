// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/compact_kv_.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(compact_kv_, CompactKVParams)

namespace {

// Signs are collected and looked at once a row, so that the loop is a few vector instructions.
void check_values(const IndexView& indices, int64_t b, int64_t h, int64_t n) {
  const int64_t* row = indices.data + b * indices.stride_b + h * indices.stride_h;
  int64_t kept = indices.m;
  while (kept > 0 && row[(kept - 1) * indices.stride_m] == -1) --kept;
  int64_t wrong = 0;
  for (int64_t i = 1; i < kept; ++i)
    wrong |= row[i * indices.stride_m] <= row[(i - 1) * indices.stride_m] ? -1 : row[(i - 1) * indices.stride_m];
  if (kept) wrong |= row[0] | (n - 1 - row[(kept - 1) * indices.stride_m]);
  int64_t last = -1;
  for (int64_t i = 0; wrong < 0 && i < kept; ++i) {
    const int64_t index = row[i * indices.stride_m];
    KVOPS_CHECK(index >= -1 && index < n, "compact_kv_: indices must lie in [-1, ", n, "), got ", index, " at row ", b,
                ", head ", h, ", entry ", i);
    KVOPS_CHECK(index > last, "compact_kv_: indices must ascend strictly with -1 only at the end, got ", index,
                " after ", last, " at row ", b, ", head ", h, ", entry ", i);
    last = index;
  }
}

void compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const CompactKVParams p = check_compact_kv_(k, v, indices);
  if (indices.numel() == 0) return;
  // Every index is checked before the first write, so that a refused call changes nothing.
  for (int64_t b = 0; b < p.b; ++b)
    for (int64_t h = 0; h < p.heads; ++h) check_values(p.indices, b, h, p.n);
  const Scratch none(0);
  compact_kv__cpu(p, none.workers(threads_for(p.b * p.heads * p.indices.m * (p.k.row_bytes + p.v.row_bytes))));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
