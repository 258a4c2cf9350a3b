// window_attention: parameters, checks, output shapes.
#pragma once
#include "window.h"

namespace kvops {

struct WindowAttentionParams {
  Window window;
  KVView v;    // [b, heads, n, dv]
  char* out;   // [b, heads * group, w, dv], contiguous, of the dtype of q
  float* lse;  // [b, heads * group, w], contiguous
  int64_t dv;
};

#ifdef KVOPS_CHECKS
inline WindowAttentionParams check_window_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& visible, std::optional<double> scale, int64_t reduce,
                                                    int64_t group_reduce, const OptionalTensor& starts, double softcap,
                                                    const OptionalTensor& sink_logits, Tensor& out, Tensor& lse,
                                                    Tensor& scores) {
  const char* op = "window_attention";
  const KVPair kv = check_kv_pair(op, k, v);
  const Window window =
      check_window(op, q, k, visible, scale, reduce, group_reduce, starts, softcap, sink_logits, scores);
  const int64_t query_heads = window.heads * window.group;
  out = empty(op, q, std::array{window.b, query_heads, window.w, kv.dv}, q.scalar_type());
  lse = empty(op, q, std::array{window.b, query_heads, window.w}, ScalarType::Float);
  return {.window = window,
          .v = kv.v,
          .out = static_cast<char*>(out.mutable_data_ptr()),
          .lse = static_cast<float*>(lse.mutable_data_ptr()),
          .dv = kv.dv};
}
#endif

}  // namespace kvops
