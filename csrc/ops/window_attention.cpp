// window_attention: checks arguments, allocates outputs, launches.
#include "window_attention.h"

#include "../host.h"
#include "rope_checks.h"
#include "window_checks.h"

namespace kvops {
namespace {

std::tuple<Tensor, Tensor, Tensor> window_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& visible, std::optional<double> scale, int64_t reduce,
                                                    int64_t group_reduce, const OptionalTensor& starts, double softcap,
                                                    const OptionalTensor& sink_logits, const OptionalTensor& cos,
                                                    const OptionalTensor& sin, bool interleaved, bool with_scores,
                                                    const OptionalTensor& block_table) {
  const char* op = "window_attention";
  const KVPair kv = check_read_pair(op, k, v, block_table);
  Window window =
      check_window(op, q, k, visible, scale, reduce, group_reduce, starts, softcap, sink_logits, block_table);
  KVOPS_CHECK(cos.has_value() == sin.has_value(), op, ": cos and sin must be given together, got ", cos ? "cos" : "sin",
              " alone");
  if (cos) window.rope = check_rope(op, kv.k, k, *cos, *sin, interleaved);
  check_head_dim(op, "k", k);
  check_head_dim(op, "v", v);
  const int64_t query_heads = window.heads * window.group;
  const Tensor out = empty(op, q, std::array{window.b, query_heads, window.w, kv.v.d}, q.scalar_type());
  const Tensor lse = empty(op, q, std::array{window.b, query_heads, window.w}, ScalarType::Float);
  const Tensor scores = empty_scores(op, q, window, with_scores);
  if (lse.numel() == 0) return {out, lse, scores};
  const WindowAttentionParams p{.window = window,
                                .v = kv.v.view,
                                .out = static_cast<char*>(out.mutable_data_ptr()),
                                .lse = static_cast<float*>(lse.mutable_data_ptr()),
                                .dv = kv.v.d};
  HostCall call(op, q);
  launch_window_attention(p, call);
  return {out, lse, scores};
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("window_attention", TORCH_BOX(&window_attention));
}

}  // namespace kvops
