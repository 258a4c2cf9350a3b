// The last queries of a sequence (the observation window) and its keys: the parameters that window_scores and
// window_attention share.
#pragma once
#include "reduce.h"
#include "rope.h"

namespace kvops {

// Queries, [b, Hq, w, d], with any strides (bytes). Query head h uses KV head h / group.
struct QueryView {
  const char* data;
  int64_t stride_b, stride_h, stride_w, stride_d;

  KVOPS_HOST_DEVICE const char* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride_b + h * stride_h + i * stride_w;
  }
};

// A value per row, fp32 [b, Hq, w], with any strides (elements).
struct RowValues {
  const float* data;  // null: not given
  int64_t stride_b, stride_h, stride_w;

  KVOPS_HOST_DEVICE float at(int64_t b, int64_t h, int64_t i) const {
    return data[b * stride_b + h * stride_h + i * stride_w];
  }
};

constexpr int64_t kMaxWindow = 256;  // rows

struct Window {
  QueryView q;                  // [b, heads * group, w, d]
  KVView k;                     // [b, heads, n, d]
  SlotRope rope;                // rotation of keys as they are read
  const int32_t* visible;       // [b or 1, w]: one past the last key that a row sees
  int64_t visible_stride;       // w, or 0 if the whole batch shares it
  const int32_t* starts;        // [b] or null: the first key that a row sees
  const float* sink_logits;     // [heads * group] or null: an extra logit in the softmax, without a key
  RowValues row_weights;        // factors of the rows' softmax weights in the scores; null: 1
  KVView key_bias;              // fp32 [b, heads, n], in pages if K is: added to the logits; null: 0
  KVView k_scale, v_scale;      // fp32, as key_bias: what int8 keys and values are multiplied by; null: not int8
  float* scores;                // [b, heads, n]; [b, heads * group, n] if group_reduce is none; null: not requested
  DType dtype;                  // of q, and of the arithmetic's inputs
  DType stored;                 // of K and V: the same, fp8, or int8 with scales
  Reduce reduce, group_reduce;  // over the rows, and over the query heads of a group
  float scale;                  // logits are scale * k_scale * q.k + key_bias,
  float softcap;                // or, unless this is 0, softcap * tanh(scale * k_scale * q.k / softcap)
  int64_t b, heads, group, w, n, d;

  // Row i of a batch entry sees keys [first(batch), limit(batch, i)). It counts only if that range is not empty.
  KVOPS_HOST_DEVICE int64_t first(int64_t batch) const { return starts ? clamped(starts[batch]) : 0; }
  KVOPS_HOST_DEVICE int64_t limit(int64_t batch, int64_t i) const {
    return clamped(visible[batch * visible_stride + i]);
  }

 private:
  KVOPS_HOST_DEVICE int64_t clamped(int64_t x) const { return x < 0 ? 0 : x < n ? x : n; }
};

}  // namespace kvops
