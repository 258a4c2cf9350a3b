// compact_kv_: parameters, launcher.
#pragma once
#include "gather_kv.h"

namespace kvops {

struct CompactKVLayer {
  KVView k, v;        // [b, Hk, n, d], [b, Hk, n, dv], read and written
  IndexView indices;  // [b, Hk, m], strictly ascending, -1 only at the end
};

struct CompactKVParams {
  const CompactKVLayer* layers;  // on the host
  int64_t num_layers, b, heads, n;
};

void launch_compact_kv_(const CompactKVParams& p, Call& call);

}  // namespace kvops
