// gather_kv: parameters, launcher.
#pragma once
#include "../kv_view.h"
#include "indices.h"

namespace kvops {

struct GatherKVParams {
  KVView k, v;          // [b, Hk, n, d], [b, Hk, n, dv]
  KVView k_out, v_out;  // [b, Hk, m, d], [b, Hk, m, dv]
  IndexView indices;    // [b, Hk, m], each in [-1, n)
  int64_t b, heads, n;
};

void launch_gather_kv(const GatherKVParams& p, Call& call);

}  // namespace kvops
