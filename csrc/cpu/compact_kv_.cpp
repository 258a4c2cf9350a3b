#include "../check.h"
//
#include "../ops/compact_kv_.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(compact_kv_, CompactKVParams)

namespace {

void compact_kv_(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const CompactKVParams p = check_compact_kv_(k, v, indices);
  if (indices.numel() == 0) return;
  // Every index is checked before the first write, so that a refused call changes nothing.
  for (int64_t b = 0; b < p.b; ++b)
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t* row = p.indices.data + b * p.indices.stride_b + h * p.indices.stride_h;
      int64_t last = -1;
      bool ended = false;
      for (int64_t i = 0; i < p.indices.m; ++i) {
        const int64_t index = row[i * p.indices.stride_m];
        KVOPS_CHECK(index >= -1 && index < p.n, "compact_kv_: indices must lie in [-1, ", p.n, "), got ", index,
                    " at row ", b, ", head ", h, ", entry ", i);
        KVOPS_CHECK(index == -1 || (index > last && !ended),
                    "compact_kv_: indices must ascend strictly with -1 only at the end, got ", index, " after ",
                    ended ? -1 : last, " at row ", b, ", head ", h, ", entry ", i);
        ended = index == -1;
        last = index;
      }
    }
  const Scratch none(0);
  compact_kv__cpu(p, none.workers(threads_for(p.b * p.heads * p.indices.m * (p.k.row_bytes + p.v.row_bytes))));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
