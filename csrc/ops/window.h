// The last queries of a sequence (the observation window) over its keys: parameters and checks that window_scores and
// window_attention share.
#pragma once
#include "reduce.h"
#include "rope.h"

namespace kvops {

// Queries, [b, Hq, w, d], of any strides (bytes). Query head h serves KV head h / group.
struct QueryView {
  const char* data;
  int64_t stride_b, stride_h, stride_w, stride_d;

  KVOPS_HOST_DEVICE const char* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride_b + h * stride_h + i * stride_w;
  }
};

constexpr int64_t kMaxWindow = 256;  // rows

struct Window {
  QueryView q;                  // [b, heads * group, w, d]
  KVView k;                     // [b, heads, n, d]
  SlotRope rope;                // by which keys turn when they are read
  const int32_t* visible;       // [b or 1, w]: one past the last key that a row sees
  int64_t visible_stride;       // w, or 0 where all of the batch share it
  const int32_t* starts;        // [b] or null: the first key that a row sees
  const float* sink_logits;     // [heads * group] or null: one more logit of the softmax, without a key
  float* scores;                // [b, heads, n], or [b, heads * group, n] if group_reduce is none; null: not asked for
  DType dtype;                  // of q, and that rows are computed in
  DType stored;                 // of K and V: the same, or fp8
  Reduce reduce, group_reduce;  // over the rows, and over the query heads of a group
  float scale;                  // logits are scale * q.k,
  float softcap;                // and if this is not 0, softcap * tanh(logit / softcap)
  int64_t b, heads, group, w, n, d;

  // Row i of batch sees [first(batch), limit(batch, i)). It counts if that is not empty.
  KVOPS_HOST_DEVICE int64_t first(int64_t batch) const { return starts ? clamped(starts[batch]) : 0; }
  KVOPS_HOST_DEVICE int64_t limit(int64_t batch, int64_t i) const {
    return clamped(visible[batch * visible_stride + i]);
  }

 private:
  KVOPS_HOST_DEVICE int64_t clamped(int64_t x) const { return x < 0 ? 0 : x < n ? x : n; }
};

}  // namespace kvops
