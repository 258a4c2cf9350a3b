// Checks that report what was expected and what came. They throw std::invalid_argument, which Python sees as
// ValueError. Every operator checks in this order: device, dtype, layout, sizes, values.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/indices.h"
#include "ops/reduce.h"

namespace kvops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

#define KVOPS_CHECK(condition, ...)               \
  do {                                            \
    if (!(condition)) ::kvops::fail(__VA_ARGS__); \
  } while (0)

inline std::string shape(const Tensor& x) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < x.dim(); ++i) text << (i ? ", " : "") << x.size(i);
  text << ']';
  return text.str();
}

// The dtype's public name, as torch prints it in Python.
inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::ComplexHalf:
      return "torch.complex32";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    default: {  // the others differ in case only
      std::string name = torch::headeronly::toString(type);
      for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
      return "torch." + name;
    }
  }
}

inline std::string device(const Tensor& x) {
  if (x.is_cpu()) return "cpu";
  return (x.is_cuda() ? "cuda:" : "an unsupported device, index ") + std::to_string(x.get_device_index());
}

inline void check_same_device(const char* op, const char* name, const Tensor& x, const Tensor& first) {
  int32_t type, first_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(first.get(), &first_type));
  KVOPS_CHECK(type == first_type && x.get_device_index() == first.get_device_index(), op, ": ", name,
              " must be on the first tensor's device ", device(first), ", got ", device(x));
}

// The dtype. torch's stable ABI throws for those that it does not know, such as float8_e8m0fnu, which errors name.
inline ScalarType dtype_of(const Tensor& x) {
  try {
    return x.scalar_type();
  } catch (const std::runtime_error&) {
    int32_t code;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &code));
    return static_cast<ScalarType>(code);
  }
}

inline DType check_dtype(const char* op, const char* name, const Tensor& x) {
  switch (dtype_of(x)) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      fail(op, ": ", name, " must be float32, float16 or bfloat16, got ", dtype_name(dtype_of(x)));
  }
}

// For tensors that are only read: fp8 is allowed too.
inline DType check_read_dtype(const char* op, const char* name, const Tensor& x) {
  switch (dtype_of(x)) {
    case ScalarType::Float8_e4m3fn:
      return DType::e4m3;
    case ScalarType::Float8_e5m2:
      return DType::e5m2;
    case ScalarType::Float:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return check_dtype(op, name, x);
    default:
      fail(op, ": ", name, " must be float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, got ",
           dtype_name(dtype_of(x)));
  }
}
// For rows that may have scales: int8 is allowed too.
inline DType check_scaled_dtype(const char* op, const char* name, const Tensor& x) {
  switch (dtype_of(x)) {
    case ScalarType::Char:
      return DType::i8;
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
    case ScalarType::Float:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return check_read_dtype(op, name, x);
    default:
      fail(op, ": ", name, " must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8, got ",
           dtype_name(dtype_of(x)));
  }
}

// For rows that are moved but not computed with: one-byte types too, that is fp8 and the integers it may be stored as.
inline void check_moved_dtype(const char* op, const char* name, const Tensor& x) {
  switch (dtype_of(x)) {
    case ScalarType::Float:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
    case ScalarType::Byte:
    case ScalarType::Char:
      return;
    default:
      fail(op, ": ", name, " must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8 or int8, got ",
           dtype_name(dtype_of(x)));
  }
}

inline void check_scalar_type(const char* op, const char* name, const Tensor& x, ScalarType expected) {
  KVOPS_CHECK(dtype_of(x) == expected, op, ": ", name, " must be ", dtype_name(expected), ", got ",
              dtype_name(dtype_of(x)));
}

// A view of a [b, Hk, n, d] tensor. The last dim must be contiguous and each row a multiple of 16 bytes. Only `written`
// tensors request a mutable pointer, because that would materialize a lazy clone.
inline KVView check_kv(const char* op, const char* name, const Tensor& x, bool written = false) {
  KVOPS_CHECK(x.dim() == 4, op, ": ", name, " must be [batch, heads, tokens, head_dim], got ", shape(x));
  const auto sizes = x.sizes(), strides = x.strides();
  const int64_t item = static_cast<int64_t>(x.element_size());
  KVOPS_CHECK(strides[3] == 1 || sizes[3] <= 1, op, ": ", name, " must have a contiguous last dim, got stride ",
              strides[3]);
  KVOPS_CHECK(sizes[3] > 0 && sizes[3] * item % 16 == 0, op, ": head_dim of ", name, " must be a positive multiple of ",
              16 / item, " (16 bytes), got ", sizes[3]);
  char* const data = static_cast<char*>(written ? x.mutable_data_ptr() : const_cast<void*>(x.const_data_ptr()));
  const bool even = reinterpret_cast<uintptr_t>(data) % 2 == 0 && (strides[0] | strides[1] | strides[2]) % 2 == 0;
  KVOPS_CHECK(item > 1 || even, op, ": ", name, " must begin at an even address and have even strides, got strides ",
              strides[0], ", ", strides[1], ", ", strides[2]);
  return {data, strides[0] * item, strides[1] * item, strides[2] * item, sizes[3] * item};
}

// K or V as an operator addresses it: [b, heads, n, d], dense or paged.
struct KV {
  KVView view;
  int64_t b, heads, n, d;
};

// x is [b, heads, n, d]. With a block table [b, max_pages], x holds the pages [num_pages, heads, page_size, d] instead,
// and n = max_pages * page_size. check_pages() checks the page numbers.
inline KV check_cache(const char* op, const char* name, const Tensor& x, const OptionalTensor& block_table,
                      bool written = false) {
  KV kv{check_kv(op, name, x, written), x.size(0), x.size(1), x.size(2), x.size(3)};
  if (!block_table) return kv;
  check_same_device(op, "block_table", *block_table, x);
  check_scalar_type(op, "block_table", *block_table, ScalarType::Int);
  KVOPS_CHECK(block_table->dim() == 2 && (block_table->stride(1) == 1 || block_table->size(1) <= 1), op,
              ": block_table must be [batch, max_pages] with a contiguous last dim, got ", shape(*block_table));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  KVOPS_CHECK(kv.b >= 1 && kv.b <= kMost && kv.n >= 1, op, ": ", name,
              " must hold 1 to 2^31 - 1 pages of at least 1 slot when block_table is given, got ", shape(x));
  KVOPS_CHECK(block_table->size(1) <= kMost / kv.n, op, ": the slots of a request in block_table must fit int32, got ",
              block_table->size(1), " pages of ", kv.n, " slots");
  kv.view.table = static_cast<const int32_t*>(block_table->const_data_ptr());
  kv.view.table_stride = block_table->stride(0);
  kv.view.page_size = static_cast<int32_t>(kv.n);
  kv.view.reciprocal = KVView::reciprocal_of(kv.n);
  kv.view.num_pages = static_cast<uint32_t>(kv.b);
  kv.b = block_table->size(0);
  kv.n *= block_table->size(1);
  return kv;
}

// For rows that are computed with: kernels widen 1-byte types to bf16, so row_bytes counts 2 bytes per element.
inline KV as_read(KV kv, const Tensor& x) {
  if (x.element_size() == 1) kv.view.row_bytes *= 2;
  return kv;
}

// check_cache() for such rows.
inline KV check_read_cache(const char* op, const char* name, const Tensor& x, const OptionalTensor& block_table) {
  return as_read(check_cache(op, name, x, block_table), x);
}

// A tensor that receives rows of `like`: [b, heads, m, head_dim of like], with like's device and dtype.
inline KVView check_target(const char* op, const char* name, const Tensor& out, const Tensor& like, int64_t b,
                           int64_t m) {
  check_same_device(op, name, out, like);
  KVOPS_CHECK(dtype_of(out) == dtype_of(like), op, ": ", name, " must have k's dtype ", dtype_name(dtype_of(like)),
              ", got ", dtype_name(dtype_of(out)));
  const KVView view = check_kv(op, name, out, true);
  KVOPS_CHECK(out.size(0) == b && out.size(1) == like.size(1) && out.size(2) == m && out.size(3) == like.size(3), op,
              ": ", name, " must be [", b, ", ", like.size(1), ", ", m, ", ", like.size(3), "], got ", shape(out));
  return view;
}

// K and V of one layer.
struct KVPair {
  KV k, v;
};

// check_type is check_dtype, check_read_dtype or check_scaled_dtype; check_moved_dtype if the operator only moves rows.
template <class CheckType>
KVPair check_kv_pair(const char* op, const Tensor& k, const Tensor& v, const OptionalTensor& block_table,
                     const CheckType& check_type, bool written = false) {
  check_same_device(op, "v", v, k);
  check_type(op, "k", k);
  KVOPS_CHECK(dtype_of(v) == dtype_of(k), op, ": v must have k's dtype ", dtype_name(dtype_of(k)), ", got ",
              dtype_name(dtype_of(v)));
  const KVPair kv{check_cache(op, "k", k, block_table, written), check_cache(op, "v", v, block_table, written)};
  for (int i = 0; i < 3; ++i)
    KVOPS_CHECK(k.size(i) == v.size(i), op, ": v must have k's ",
                block_table ? "pages, heads and page size " : "batch, heads and tokens ", shape(k), ", got ", shape(v));
  return kv;
}

// For rows that are computed with.
inline KVPair check_read_pair(const char* op, const Tensor& k, const Tensor& v, const OptionalTensor& block_table,
                              DType check_type(const char*, const char*, const Tensor&) = check_read_dtype) {
  const KVPair kv = check_kv_pair(op, k, v, block_table, check_type);
  return {as_read(kv.k, k), as_read(kv.v, v)};
}

// Whether to copy values back from the GPU (indices, starts, lengths, budgets) and check them. kvops.debug_checks()
// sets this flag; the CPU and the CUDA library have one each.
inline bool& debug_checks() {
  static bool on = false;
  return on;
}

// x if its values can be checked: on the CPU, x itself; on a GPU, a host copy under debug_checks(), otherwise nothing.
inline OptionalTensor readable(const Tensor& x) {
#ifdef KVOPS_GPU
  if (!debug_checks()) return std::nullopt;
  return torch::stable::to(x, torch::stable::Device(torch::headeronly::DeviceType::CPU));
#else
  return x;
#endif
}

inline OptionalTensor readable(const OptionalTensor& x) {
  return x ? readable(*x) : x;
}

// The values of such a tensor, or null.
template <class T>
const T* values_of(const OptionalTensor& x) {
  return x ? static_cast<const T*>(x->const_data_ptr()) : nullptr;
}

// `starts` and `lengths` of a padded batch.
inline ValidSlots check_valid_slots(const char* op, const Tensor& like, int64_t b, int64_t n,
                                    const OptionalTensor& starts, const OptionalTensor& lengths) {
  KVOPS_CHECK(n <= std::numeric_limits<int32_t>::max(), op, ": the number of tokens must fit int32, got ", n);
  ValidSlots slots{nullptr, nullptr, n};
  auto check = [&](const char* name, const OptionalTensor& x) -> const int32_t* {
    if (!x) return nullptr;
    check_same_device(op, name, *x, like);
    check_scalar_type(op, name, *x, ScalarType::Int);
    KVOPS_CHECK(x->dim() == 1 && x->size(0) == b && x->is_contiguous(), op, ": ", name, " must be a contiguous int32 [",
                b, "], got ", shape(*x));
    return static_cast<const int32_t*>(x->const_data_ptr());
  };
  slots.starts = check("starts", starts);
  slots.lengths = check("lengths", lengths);
  const OptionalTensor start_values = readable(starts), length_values = readable(lengths);
  if (!start_values && !length_values) return slots;
  const auto at = [](const OptionalTensor& x, int64_t i) {
    return static_cast<const int32_t*>(x->const_data_ptr())[i];
  };
  for (int64_t i = 0; i < b; ++i) {
    const int64_t start = start_values ? at(start_values, i) : 0;
    const int64_t length = length_values ? at(length_values, i) : n - start;
    KVOPS_CHECK(start >= 0 && length >= 0 && start + length <= n, op, ": starts and lengths of row ", i,
                " must describe slots in [0, ", n, "], got start ", start, ", length ", length);
  }
  return slots;
}

// The slots that a request uses.
struct SlotRange {
  int64_t first, last;
};

// Checks that the block table names pages of k for all slots in use: range(b) for request b. If the operator writes to
// the pages, each may be named only once; otherwise two requests would write to the same page. `range` is called only
// when the table's values can be checked.
template <class Range>
void check_pages(const char* op, const OptionalTensor& block_table, const Tensor& k, const Range& range,
                 bool written = false) {
  const OptionalTensor table = readable(block_table);
  if (!table) return;
  const int64_t pages = k.size(0), size = k.size(2);
  std::vector<bool> taken(written ? pages : 0);
  for (int64_t b = 0; b < table->size(0); ++b) {
    const SlotRange used = range(b);
    if (used.first >= used.last) continue;
    const int32_t* const row = values_of<int32_t>(table) + b * table->stride(0);
    for (int64_t i = used.first / size; i <= (used.last - 1) / size; ++i) {
      KVOPS_CHECK(row[i] >= 0 && row[i] < pages, op, ": block_table must name pages in [0, ", pages,
                  ") for all slots in use, got ", row[i], " at request ", b, ", page ", i);
      if (!written) continue;
      KVOPS_CHECK(!taken[row[i]], op, ": block_table must name each page once, since the call writes to it, got page ",
                  row[i], " again at request ", b, ", page ", i);
      taken[row[i]] = true;
    }
  }
}

// For the valid slots of n. starts and lengths have been checked already.
inline void check_pages(const char* op, const OptionalTensor& block_table, const Tensor& k, int64_t n,
                        const OptionalTensor& starts, const OptionalTensor& lengths) {
  if (!block_table) return;
  const OptionalTensor firsts = readable(starts), counts = readable(lengths);
  const ValidSlots slots{values_of<int32_t>(firsts), values_of<int32_t>(counts), n};
  check_pages(op, block_table, k,
              [&](int64_t b) { return SlotRange{slots.first(b), slots.first(b) + slots.count(b)}; });
}

inline IndexView check_indices(const char* op, const Tensor& indices, const Tensor& k, const KV& kv,
                               const char* name = "indices") {
  check_same_device(op, name, indices, k);
  check_scalar_type(op, name, indices, ScalarType::Long);
  KVOPS_CHECK(indices.dim() == 3 && indices.size(0) == kv.b && indices.size(1) == kv.heads, op, ": ", name,
              " must be [batch, heads, kept] = [", kv.b, ", ", kv.heads, ", m], got ", shape(indices));
  return {static_cast<const int64_t*>(indices.const_data_ptr()), indices.stride(0), indices.stride(1),
          indices.stride(2), indices.size(2)};
}

// Calls check(row, stride, m, b, h) for each row of indices whose values can be checked.
template <class Check>
void for_index_rows(const Tensor& indices, const Check& check) {
  const OptionalTensor values = readable(indices);
  if (!values || values->numel() == 0) return;
  const int64_t* const data = static_cast<const int64_t*>(values->const_data_ptr());
  for (int64_t b = 0; b < values->size(0); ++b)
    for (int64_t h = 0; h < values->size(1); ++h)
      check(data + b * values->stride(0) + h * values->stride(1), values->stride(2), values->size(2), b, h);
}

// Indices in [-1, n). The loop collects sign bits and tests them once per row, so that it compiles to a few vector
// instructions.
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

// Indices in [-1, n), strictly ascending, with -1 only at the end. Vectorized like check_index_values.
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
      KVOPS_CHECK(index > last, op, ": ", name, " must be strictly ascending with -1 only at the end, got ", index,
                  " after ", last, " at row ", b, ", head ", h, ", entry ", i);
      last = index;
    }
  });
}

// The range from a request's lowest to its highest index, for check_pages().
class IndexRange {
 public:
  explicit IndexRange(const Tensor& indices) : values_(readable(indices)) {}

  SlotRange operator()(int64_t b) const {
    SlotRange range{std::numeric_limits<int64_t>::max(), 0};
    const int64_t heads = values_->size(1), m = values_->size(2), stride = values_->stride(2);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t* const row = values_of<int64_t>(values_) + b * values_->stride(0) + h * values_->stride(1);
      for (int64_t i = 0; i < m; ++i) {
        const int64_t slot = row[i * stride];
        if (slot >= 0 && slot < range.first) range.first = slot;
        if (slot >= range.last) range.last = slot + 1;
      }
    }
    return range;
  }

 private:
  OptionalTensor values_;
};

// A budget per row and head, int32 [b, Hk]: at least the number of protected slots, at most k.
inline const int32_t* check_budgets(const char* op, const Tensor& budgets, const Tensor& scores, int64_t least,
                                    int64_t most) {
  const int64_t b = scores.size(0), heads = scores.size(1);
  check_same_device(op, "budgets", budgets, scores);
  check_scalar_type(op, "budgets", budgets, ScalarType::Int);
  KVOPS_CHECK(budgets.dim() == 2 && budgets.size(0) == b && budgets.size(1) == heads && budgets.is_contiguous(), op,
              ": budgets must be a contiguous int32 [", b, ", ", heads, "], got ", shape(budgets));
  const OptionalTensor values = readable(budgets);
  const int32_t* value = values ? static_cast<const int32_t*>(values->const_data_ptr()) : nullptr;
  for (int64_t i = 0; value && i < b * heads; ++i)
    KVOPS_CHECK(value[i] >= least && value[i] <= most, op, ": budgets must lie in [", least, ", ", most, "], got ",
                value[i], " for row ", i / heads, ", head ", i % heads);
  return static_cast<const int32_t*>(budgets.const_data_ptr());
}

// The reduction with this code, which may be at most `last`.
inline Reduce check_reduce(const char* op, const char* name, int64_t value, Reduce last) {
  constexpr const char* kNames[] = {"0 (sum)", "1 (mean)", "2 (max)", "3 (none)"};
  const int64_t most = static_cast<int64_t>(last);
  if (value >= 0 && value <= most) return static_cast<Reduce>(value);
  std::string allowed;
  for (int64_t i = 0; i <= most; ++i) allowed += (i == 0 ? "" : i < most ? ", " : " or ") + std::string(kNames[i]);
  fail(op, ": ", name, " must be ", allowed, ", got ", value);
}

}  // namespace kvops
