// What is known of a row's logits: their softmax's maximum and sum, and how a logit becomes a weight.
#pragma once
#include "../ops/window.h"
#include "math.cuh"

namespace kvops {
namespace {

// Logits times log2(e) this large are rounded, scale and all, before anything is subtracted from them: fused to one
// multiply-add with it, a logit's difference from itself, rounded, would be that rounding, and not 0.
constexpr float kLargeLogit = 0x1p14f;

// sum over keys of 2^(logit), as sum * 2^most; logits times log2(e).
struct RowSum {
  float most, sum;

  __device__ static RowSum none() { return {-CUDART_INF_F, 0.0f}; }
  __device__ void add(const RowSum& x) {
    const float top = fmaxf(most, x.most), at = top == -CUDART_INF_F ? 0.0f : top;
    sum = sum * exp2_fast(most - at) + x.sum * exp2_fast(x.most - at);
    most = top;
  }
};

// A weight is 2^(logit - less) * |factor|. The factor is 1, but where `less` is large: there it is negative.
struct RowWeight {
  float less, factor;

  // Of a product; its logit is scale times it. To the bit what a loop makes that knows factors to be 1 and fuses.
  __device__ float of(float product, float scale) const {
    return factor < 0.0f ? of(__fmul_rn(product, scale)) : exp2_fast(fmaf(product, scale, -less));
  }

  // Of a logit that has been rounded.
  __device__ float of(float logit) const {
    const float exponent = logit - less;
    return factor < 0.0f ? exp2_fast(fminf(exponent, 0.0f)) * -factor : exp2_fast(exponent);
  }
};

// Of a row whose keys add up to `total`, and the sink, where there is one. Without any, all weights are 0.
__device__ inline RowWeight row_weight(const Window& p, RowSum total, int64_t query_head) {
  if (p.sink_logits) total.add({p.sink_logits[query_head] * kLog2e, 1.0f});
  if (total.sum == 0.0f) return {CUDART_INF_F, -1.0f};
  const float log = total.most + log2f(total.sum);
  return fabsf(log) < kLargeLogit ? RowWeight{log, 1.0f} : RowWeight{total.most, -1.0f / total.sum};
}

// A given lse as such a total.
__device__ inline RowSum total_of_lse(float lse) {
  return {lse * kLog2e, lse == -CUDART_INF_F ? 0.0f : 1.0f};
}

}  // namespace
}  // namespace kvops
