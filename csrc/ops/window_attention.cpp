// window_attention: checks arguments, allocates outputs, launches.
#include "window_attention.h"

#include "../host.h"
#include "rope_checks.h"
#include "window_checks.h"

namespace kvops {
namespace {

KVView check_key_bias(const char* op, const Tensor& bias, const Tensor& k, const KVView& of_k, double softcap,
                      float scale) {
  const KVView view = check_key_values(op, "key_bias", bias, k, of_k);
  KVOPS_CHECK(softcap == 0, op, ": softcap must be 0 with key_bias, got ", softcap);
  // Kernels add key_bias / scale to q.k.
  KVOPS_CHECK(scale >= 1e-6f && scale <= 1e6f, op, ": scale must lie in [1e-6, 1e6] with key_bias, got ", scale);
  return view;
}

std::tuple<Tensor, Tensor, Tensor> window_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& visible, std::optional<double> scale, int64_t reduce,
                                                    int64_t group_reduce, const OptionalTensor& starts, double softcap,
                                                    const OptionalTensor& sink_logits, const OptionalTensor& cos,
                                                    const OptionalTensor& sin, bool interleaved, bool with_scores,
                                                    const OptionalTensor& key_bias, const OptionalTensor& k_scale,
                                                    const OptionalTensor& v_scale, const OptionalTensor& block_table) {
  const char* op = "window_attention";
  const KVPair kv = check_read_pair(op, k, v, block_table, check_scaled_dtype);
  Window window =
      check_window(op, q, k, visible, scale, reduce, group_reduce, starts, softcap, sink_logits, k_scale, block_table);
  window.v_scale = check_scales(op, "v_scale", v_scale, v, kv.v.view);
  KVOPS_CHECK(cos.has_value() == sin.has_value(), op, ": cos and sin must be given together, got ", cos ? "cos" : "sin",
              " alone");
  KVOPS_CHECK(!cos || !k_scale, op,
              ": cos and sin must be None if k is torch.int8, whose keys are rotated before they "
              "are rounded, got both");
  if (cos) window.rope = check_rope(op, kv.k, k, *cos, *sin, interleaved);
  if (key_bias) window.key_bias = check_key_bias(op, *key_bias, k, kv.k.view, softcap, window.scale);
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
