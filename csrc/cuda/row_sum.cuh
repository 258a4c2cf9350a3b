// The statistics of a row's logits: the softmax's maximum and sum, and how a logit becomes a weight.
#pragma once
#include "../ops/window.h"
#include "math.cuh"

namespace kvops {
namespace {

// Logits times log2(e) of at least this size are rounded, including the scale, before anything is subtracted from them.
// With a fused multiply-add, the difference between a logit and its own rounded value would be the rounding error
// instead of 0.
constexpr float kLargeLogit = 0x1p14f;

// The sum over keys of 2^logit, stored as sum * 2^most. Logits are multiplied by log2(e).
struct RowSum {
  float most, sum;

  __device__ static RowSum none() { return {-CUDART_INF_F, 0.0f}; }
  __device__ void add(const RowSum& x) {
    const float top = fmaxf(most, x.most), at = top == -CUDART_INF_F ? 0.0f : top;
    sum = sum * exp2_fast(most - at) + x.sum * exp2_fast(x.most - at);
    most = top;
  }
};

// A weight is 2^(logit - less) * |factor|. The factor is 1 unless `less` is large; then it is negative.
struct RowWeight {
  float less, factor;

  // The weight of a product, whose logit is scale times it. Bit-identical to a loop that assumes factors of 1 and
  // fuses.
  __device__ float of(float product, float scale) const {
    return factor < 0.0f ? of(__fmul_rn(product, scale)) : exp2_fast(fmaf(product, scale, -less));
  }

  // The weight of a rounded logit.
  __device__ float of(float logit) const {
    const float exponent = logit - less;
    return factor < 0.0f ? exp2_fast(fminf(exponent, 0.0f)) * -factor : exp2_fast(exponent);
  }
};

// The weight of a row whose keys add up to `total`, plus the sink, if any. If both are empty, all weights are 0.
__device__ inline RowWeight row_weight(const Window& p, RowSum total, int64_t query_head) {
  if (p.sink_logits) total.add({p.sink_logits[query_head] * kLog2e, 1.0f});
  if (total.sum == 0.0f) return {CUDART_INF_F, -1.0f};
  const float log = total.most + log2f(total.sum);
  return fabsf(log) < kLargeLogit ? RowWeight{log, 1.0f} : RowWeight{total.most, -1.0f / total.sum};
}

// What outputs scaled by 2^-most are multiplied by. Not by way of the logarithm, which is rounded: a weight of nearly 1
// must leave to the others what they have.
__device__ inline float row_factor(const Window& p, RowSum total, int64_t query_head) {
  const float most = total.most;
  if (p.sink_logits) total.add({p.sink_logits[query_head] * kLog2e, 1.0f});
  return exp2_fast(most - total.most) / total.sum;
}

// The same for row i of the scores, which may have a factor of its own.
__device__ inline RowWeight score_weight(const Window& p, RowSum total, int64_t batch, int64_t query_head, int64_t i) {
  RowWeight weight = row_weight(p, total, query_head);
  if (!p.row_weights.data) return weight;
  const float own = p.row_weights.at(batch, query_head, i);
  if (own == 0.0f) return {CUDART_INF_F, -1.0f};
  if (weight.factor < 0.0f)
    weight.factor *= own;
  else
    weight.less -= log2f(own);
  return weight.factor == 0.0f ? RowWeight{CUDART_INF_F, -1.0f} : weight;  // too small for fp32
}

// A given lse as such a total.
__device__ inline RowSum total_of_lse(float lse) {
  return {lse * kLog2e, lse == -CUDART_INF_F ? 0.0f : 1.0f};
}

}  // namespace
}  // namespace kvops
