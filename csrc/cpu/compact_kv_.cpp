// check.h first: it makes the checks in ops/ visible.
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
  const Scratch none;
  compact_kv__cpu(p, none.workers(threads_for(p.b * p.heads * p.indices.m * (p.k.row_bytes + p.v.row_bytes))));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("compact_kv_", TORCH_BOX(&compact_kv_));
}

}  // namespace kvops
