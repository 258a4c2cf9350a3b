// Rows of slots, as select_topk gives them, and their checks.
#pragma once
#include "../kv_view.h"

namespace kvops {

// Integer rows [b, Hk, m] of any strides.
struct IndexView {
  const int64_t* data;
  int64_t stride_b, stride_h, stride_m;  // elements
  int64_t m;
};

#ifdef KVOPS_CHECKS
inline IndexView check_indices(const char* op, const Tensor& indices, const Tensor& k, const char* name = "indices") {
  check_same_device(op, name, indices, k);
  check_scalar_type(op, name, indices, ScalarType::Long);
  KVOPS_CHECK(indices.dim() == 3 && indices.size(0) == k.size(0) && indices.size(1) == k.size(1), op, ": ", name,
              " must be [batch, heads, kept] = [", k.size(0), ", ", k.size(1), ", m], got ", shape(indices));
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
inline void check_index_values(const char* op, const Tensor& indices, int64_t n, const char* name = "indices") {
  for_index_rows(indices, [&](const int64_t* row, int64_t stride, int64_t m, int64_t b, int64_t h) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < m; ++i) {
      const int64_t index = row[i * stride];
      wrong |= index < 0 ? index + 1 : n - 1 - index;
    }
    for (int64_t i = 0; wrong < 0 && i < m; ++i)
      KVOPS_CHECK(row[i * stride] >= -1 && row[i * stride] < n, op, ": ", name, " must lie in [-1, ", n, "), got ",
                  row[i * stride], " at row ", b, ", head ", h, ", entry ", i);
  });
}

// Indices in [-1, n), strictly ascending, -1 only at the end. Collected like check_index_values.
inline void check_ascending_values(const char* op, const Tensor& indices, int64_t n, const char* name = "indices") {
  for_index_rows(indices, [&](const int64_t* row, int64_t stride, int64_t m, int64_t b, int64_t h) {
    int64_t kept = m;
    while (kept > 0 && row[(kept - 1) * stride] == -1) --kept;
    int64_t wrong = 0;
    for (int64_t i = 1; i < kept; ++i) wrong |= row[i * stride] <= row[(i - 1) * stride] ? -1 : row[(i - 1) * stride];
    if (kept) wrong |= row[0] | (n - 1 - row[(kept - 1) * stride]);
    int64_t last = -1;
    for (int64_t i = 0; wrong < 0 && i < kept; ++i) {
      const int64_t index = row[i * stride];
      KVOPS_CHECK(index >= -1 && index < n, op, ": ", name, " must lie in [-1, ", n, "), got ", index, " at row ", b,
                  ", head ", h, ", entry ", i);
      KVOPS_CHECK(index > last, op, ": ", name, " must ascend strictly with -1 only at the end, got ", index, " after ",
                  last, " at row ", b, ", head ", h, ", entry ", i);
      last = index;
    }
  });
}
#endif

}  // namespace kvops
