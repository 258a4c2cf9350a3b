// The checks of window_scores and window_attention.
#pragma once
#include "../host.h"
#include "window.h"

namespace kvops {

// Whether x, which kernels use as fp32, is positive and rounds neither to 0 or infinity nor to a subnormal number.
inline bool is_normal(double x) {
  return x >= std::numeric_limits<float>::min() && x <= std::numeric_limits<float>::max();
}

// A tensor of one value per slot of k (or v), fp32 [b, heads, n] with any strides, in pages if K is.
inline KVView check_key_values(const char* op, const char* name, const Tensor& x, const Tensor& k, const KVView& of_k) {
  check_same_device(op, name, x, k);
  check_scalar_type(op, name, x, ScalarType::Float);
  KVOPS_CHECK(x.dim() == 3 && x.size(0) == k.size(0) && x.size(1) == k.size(1) && x.size(2) == k.size(2), op, ": ",
              name, " must be float32 [", k.size(0), ", ", k.size(1), ", ", k.size(2), "], one value per slot, got ",
              shape(x));
  KVView view = of_k;  // of the same pages, if there are any
  view.data = const_cast<char*>(static_cast<const char*>(x.const_data_ptr()));
  view.stride_b = 4 * x.stride(0);
  view.stride_h = 4 * x.stride(1);
  view.stride_n = 4 * x.stride(2);
  view.row_bytes = 4;
  return view;
}

// The scales of K or V, which int8 has and no other dtype.
inline KVView check_scales(const char* op, const char* name, const OptionalTensor& scales, const Tensor& k,
                           const KVView& of_k) {
  const bool int8 = dtype_of(k) == ScalarType::Char;
  KVOPS_CHECK(int8 == scales.has_value(), op, ": ", name, int8 ? " must be given" : " must be None", " if k is ",
              dtype_name(dtype_of(k)), ", got ", int8 ? "None" : "a tensor");
  return scales ? check_key_values(op, name, *scales, k, of_k) : KVView{};
}

// Checks all arguments except window_scores' lse and those that only window_attention has. `scores` stays null until
// empty_scores().
inline Window check_window(const char* op, const Tensor& q, const Tensor& k, const Tensor& visible,
                           std::optional<double> scale, int64_t reduce, int64_t group_reduce,
                           const OptionalTensor& starts, double softcap, const OptionalTensor& sink_logits,
                           const OptionalTensor& k_scale, const OptionalTensor& block_table) {
  check_same_device(op, "k", k, q);
  const DType dtype = check_dtype(op, "q", q), stored = check_scaled_dtype(op, "k", k);
  const bool narrow = k.element_size() == 1;
  KVOPS_CHECK(narrow ? dtype == DType::bf16 : stored == dtype, op,
              !narrow               ? ": k must have q's dtype "
              : stored == DType::i8 ? ": q must be torch.bfloat16 with int8 keys, k "
                                    : ": q must be torch.bfloat16 with fp8 keys, k ",
              dtype_name(dtype_of(narrow ? k : q)), ", got ", dtype_name(dtype_of(narrow ? q : k)));
  KVOPS_CHECK(q.dim() == 4, op, ": q must be [batch, query heads, rows, head_dim], got ", shape(q));
  const KV kv = check_read_cache(op, "k", k, block_table);
  const auto& [k_view, b, heads, n, d] = kv;
  const int64_t query_heads = q.size(1), w = q.size(2);
  KVOPS_CHECK(q.size(0) == b && q.size(3) == d, op, ": q must have k's batch and head_dim, ", b, " and ", d, ", got ",
              shape(q));
  KVOPS_CHECK(heads > 0 ? query_heads > 0 && query_heads % heads == 0 : query_heads == 0, op,
              ": the query heads of q must be a multiple of the KV heads ", heads, ", got ", query_heads);
  KVOPS_CHECK(w >= 1 && w <= kMaxWindow, op, ": q must have 1 to ", kMaxWindow, " rows, got ", w);
  KVOPS_CHECK(n <= std::numeric_limits<int32_t>::max(), op, ": the number of tokens must fit int32, got ", n);
  check_same_device(op, "visible", visible, q);
  check_scalar_type(op, "visible", visible, ScalarType::Int);
  const bool per_batch = visible.dim() == 2;
  KVOPS_CHECK((per_batch ? visible.size(0) == b && visible.size(1) == w : visible.dim() == 1 && visible.size(0) == w) &&
                  visible.is_contiguous(),
              op, ": visible must be a contiguous int32 [", w, "] or [", b, ", ", w, "], got ", shape(visible));
  if (starts) {
    check_same_device(op, "starts", *starts, q);
    check_scalar_type(op, "starts", *starts, ScalarType::Int);
    KVOPS_CHECK(starts->dim() == 1 && starts->size(0) == b && starts->is_contiguous(), op,
                ": starts must be a contiguous int32 [", b, "], got ", shape(*starts));
  }
  if (sink_logits) {
    check_same_device(op, "sink_logits", *sink_logits, q);
    check_scalar_type(op, "sink_logits", *sink_logits, ScalarType::Float);
    KVOPS_CHECK(sink_logits->dim() == 1 && sink_logits->size(0) == query_heads && sink_logits->is_contiguous(), op,
                ": sink_logits must be a contiguous float32 [", query_heads, "], got ", shape(*sink_logits));
  }
  const double used_scale = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(d));
  KVOPS_CHECK(is_normal(used_scale), op, ": scale must be positive and a normal number in fp32, got ", used_scale);
  KVOPS_CHECK(softcap == 0 || is_normal(softcap), op,
              ": softcap must be 0 (none) or positive and a normal number in fp32, got ", softcap);
  KVOPS_CHECK(softcap == 0 || is_normal(used_scale / softcap), op,
              ": scale / softcap must be a normal number in fp32, got ", used_scale, " / ", softcap);
  const Reduce over_rows = check_reduce(op, "reduce", reduce, Reduce::max);
  const Reduce over_group = check_reduce(op, "group_reduce", group_reduce, Reduce::none);
  const OptionalTensor limits = readable(visible), firsts = readable(starts);
  const auto check_range = [&](const char* name, const OptionalTensor& values) {
    const int32_t* const value = values_of<int32_t>(values);
    for (int64_t i = 0; value && i < values->numel(); ++i)
      KVOPS_CHECK(value[i] >= 0 && value[i] <= kv.n, op, ": ", name, " must lie in [0, ", kv.n, "], got ", value[i]);
  };
  check_range("visible", limits);
  check_range("starts", firsts);
  const int64_t visible_stride = per_batch ? w : 0;
  check_pages(op, block_table, k, [&](int64_t i) {
    const int32_t* const limit = values_of<int32_t>(limits) + i * visible_stride;
    return SlotRange{firsts ? values_of<int32_t>(firsts)[i] : 0, *std::max_element(limit, limit + w)};
  });
  const auto strides = q.strides();
  const int64_t item = static_cast<int64_t>(q.element_size());
  return {.q = {static_cast<const char*>(q.const_data_ptr()), strides[0] * item, strides[1] * item, strides[2] * item,
                strides[3] * item},
          .k = k_view,
          .rope = {},
          .visible = static_cast<const int32_t*>(visible.const_data_ptr()),
          .visible_stride = visible_stride,
          .starts = starts ? static_cast<const int32_t*>(starts->const_data_ptr()) : nullptr,
          .sink_logits = sink_logits ? static_cast<const float*>(sink_logits->const_data_ptr()) : nullptr,
          .row_weights = {},
          .key_bias = {},
          .k_scale = check_scales(op, "k_scale", k_scale, k, k_view),
          .v_scale = {},
          .scores = nullptr,
          .dtype = dtype,
          .stored = stored,
          .reduce = over_rows,
          .group_reduce = over_group,
          .scale = static_cast<float>(used_scale),
          .softcap = static_cast<float>(softcap),
          .b = b,
          .heads = heads,
          .group = heads ? query_heads / heads : 1,
          .w = w,
          .n = n,
          .d = d};
}

// Allocates the scores and stores them in the window. If they are not `wanted`, returns an empty tensor.
inline Tensor empty_scores(const char* op, const Tensor& q, Window& w, bool wanted = true) {
  const int64_t rows = w.group_reduce == Reduce::none ? w.heads * w.group : w.heads;
  const Tensor scores = empty(op, q, std::array{w.b, rows, wanted ? w.n : 0}, ScalarType::Float);
  if (wanted) w.scores = static_cast<float*>(scores.mutable_data_ptr());
  return scores;
}

}  // namespace kvops
