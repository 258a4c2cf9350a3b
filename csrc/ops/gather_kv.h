// gather_kv: parameters, checks, output shapes.
#pragma once
#include "../kv_view.h"

namespace kvops {

// Integer rows [b, Hk, m] of any strides.
struct IndexView {
  const int64_t* data;
  int64_t stride_b, stride_h, stride_m;  // elements
  int64_t m;
};

struct GatherKVParams {
  KVView k, v;          // [b, Hk, n, d], [b, Hk, n, dv]
  KVView k_out, v_out;  // [b, Hk, m, d], [b, Hk, m, dv]
  IndexView indices;    // [b, Hk, m], each in [-1, n)
  int64_t b, heads, n;
};

#ifdef KVOPS_CHECKS
inline IndexView check_indices(const char* op, const Tensor& indices, const Tensor& k) {
  check_same_device(op, "indices", indices, k);
  check_scalar_type(op, "indices", indices, ScalarType::Long);
  KVOPS_CHECK(indices.dim() == 3 && indices.size(0) == k.size(0) && indices.size(1) == k.size(1), op,
              ": indices must be [batch, heads, kept] = [", k.size(0), ", ", k.size(1), ", m], got ", shape(indices));
  return {static_cast<const int64_t*>(indices.const_data_ptr()), indices.stride(0), indices.stride(1),
          indices.stride(2), indices.size(2)};
}

// check(row, stride, m, b, h) for each row of indices whose values can be checked.
template <class Check>
void for_index_rows(const Tensor& indices, const Check& check) {
  const OptionalTensor values = readable(indices);
  if (!values || values->numel() == 0) return;
  const int64_t* const data = static_cast<const int64_t*>(values->const_data_ptr());
  for (int64_t b = 0; b < values->size(0); ++b)
    for (int64_t h = 0; h < values->size(1); ++h)
      check(data + b * values->stride(0) + h * values->stride(1), values->stride(2), values->size(2), b, h);
}

// Indices in [-1, n). Signs are collected and looked at once a row, so that the loop is a few vector instructions.
inline void check_index_values(const char* op, const Tensor& indices, int64_t n) {
  for_index_rows(indices, [&](const int64_t* row, int64_t stride, int64_t m, int64_t b, int64_t h) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < m; ++i) {
      const int64_t index = row[i * stride];
      wrong |= index < 0 ? index + 1 : n - 1 - index;
    }
    for (int64_t i = 0; wrong < 0 && i < m; ++i)
      KVOPS_CHECK(row[i * stride] >= -1 && row[i * stride] < n, op, ": indices must lie in [-1, ", n, "), got ",
                  row[i * stride], " at row ", b, ", head ", h, ", entry ", i);
  });
}

// What is read, before the targets are known.
inline GatherKVParams check_gather_kv(const Tensor& k, const Tensor& v, const Tensor& indices) {
  const KVPair kv = check_kv_pair("gather_kv", k, v);
  const IndexView view = check_indices("gather_kv", indices, k);
  return {.k = kv.k, .v = kv.v, .k_out = {}, .v_out = {}, .indices = view, .b = kv.b, .heads = kv.heads, .n = kv.n};
}

inline void check_gather_kv_targets(const Tensor& k, const Tensor& v, const Tensor& k_out, const Tensor& v_out,
                                    GatherKVParams& p) {
  const char* op = "gather_kv";
  const auto target = [&](const char* name, const Tensor& out, const char* like_name, const Tensor& like) {
    check_same_device(op, name, out, k);
    KVOPS_CHECK(out.scalar_type() == k.scalar_type(), op, ": ", name, " must have k's dtype ",
                torch::headeronly::toString(k.scalar_type()), ", got ", torch::headeronly::toString(out.scalar_type()));
    const KVView view = check_kv(op, name, out, true);
    KVOPS_CHECK(
        out.size(0) == p.b && out.size(1) == p.heads && out.size(2) == p.indices.m && out.size(3) == like.size(3), op,
        ": ", name, " must be [", p.b, ", ", p.heads, ", ", p.indices.m, ", ", like.size(3), "], got ", shape(out));
    check_target(op, name, out, like_name, like);
    return view;
  };
  p.k_out = target("k_out", k_out, "k", k);
  p.v_out = target("v_out", v_out, "v", v);
  check_target(op, "k_out", k_out, "v", v);
  check_target(op, "v_out", v_out, "k", k);
  check_target(op, "k_out", k_out, "v_out", v_out);
}
#endif

}  // namespace kvops
