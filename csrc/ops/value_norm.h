// value_norm: parameters, launcher.
#pragma once
#include "../kv_view.h"
#include "reduce.h"

namespace kvops {

struct ValueNormParams {
  KVView v;          // [b, Hk, n, dv]
  const char* w_o;   // [hidden, Hk * group * dv], in v's dtype; bf16 for fp8
  int64_t w_stride;  // bytes from row to row
  float* norms;      // [b, Hk, n]
  DType dtype;       // of v
  ValidSlots slots;
  int64_t b, heads, group, n, dv, hidden;
  Reduce group_reduce;  // sum, mean or max

  // Row c of the output projection of query head `head`.
  KVOPS_HOST_DEVICE const char* weights(int64_t c, int64_t head, int64_t item) const {
    return w_o + c * w_stride + head * dv * item;
  }
};

void launch_value_norm(const ValueNormParams& p, Call& call);

}  // namespace kvops
