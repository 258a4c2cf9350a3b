// Checks that say what was expected and what came. They throw std::invalid_argument, which Python sees as ValueError.
// Order in every operator: device, dtype, layout, sizes, values. Include this before ops/<op>.h to get their checks.
#pragma once
#define KVOPS_CHECKS

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <new>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kv_view.h"

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

inline std::string device(const Tensor& x) {
  if (x.is_cpu()) return "cpu";
  return (x.is_cuda() ? "cuda:" : "another device, index ") + std::to_string(x.get_device_index());
}

inline void check_same_device(const char* op, const char* name, const Tensor& x, const Tensor& first) {
  int32_t type, first_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(first.get(), &first_type));
  KVOPS_CHECK(type == first_type && x.get_device_index() == first.get_device_index(), op, ": ", name,
              " must be on the first tensor's device ", device(first), ", got ", device(x));
}

inline DType check_dtype(const char* op, const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      fail(op, ": ", name, " must be float32, float16 or bfloat16, got ", torch::headeronly::toString(x.scalar_type()));
  }
}

inline void check_scalar_type(const char* op, const char* name, const Tensor& x, ScalarType expected) {
  KVOPS_CHECK(x.scalar_type() == expected, op, ": ", name, " must be ", torch::headeronly::toString(expected), ", got ",
              torch::headeronly::toString(x.scalar_type()));
}

// A [b, Hk, n, d] tensor as a view. The rows must be contiguous and of whole 16-byte pieces. Only a tensor that is
// `written` is asked for mutable memory: that would copy a lazy clone.
inline KVView check_kv(const char* op, const char* name, const Tensor& x, bool written = false) {
  KVOPS_CHECK(x.dim() == 4, op, ": ", name, " must be [batch, heads, tokens, head_dim], got ", shape(x));
  const auto sizes = x.sizes(), strides = x.strides();
  const int64_t item = static_cast<int64_t>(x.element_size());
  KVOPS_CHECK(strides[3] == 1 || sizes[3] <= 1, op, ": ", name, " must have a contiguous last dim, got stride ",
              strides[3]);
  KVOPS_CHECK(sizes[3] > 0 && sizes[3] * item % 16 == 0, op, ": head_dim of ", name, " must be a positive multiple of ",
              16 / item, " (16 bytes), got ", sizes[3]);
  char* const data = static_cast<char*>(written ? x.mutable_data_ptr() : const_cast<void*>(x.const_data_ptr()));
  return {data, strides[0] * item, strides[1] * item, strides[2] * item, sizes[3] * item};
}

struct KVPair {
  KVView k, v;
  DType dtype;
  int64_t b, heads, n, d, dv;
};

inline KVPair check_kv_pair(const char* op, const Tensor& k, const Tensor& v, bool written = false) {
  check_same_device(op, "v", v, k);
  const DType dtype = check_dtype(op, "k", k);
  KVOPS_CHECK(check_dtype(op, "v", v) == dtype, op, ": v must have k's dtype ",
              torch::headeronly::toString(k.scalar_type()), ", got ", torch::headeronly::toString(v.scalar_type()));
  const KVView k_view = check_kv(op, "k", k, written), v_view = check_kv(op, "v", v, written);
  for (int i = 0; i < 3; ++i)
    KVOPS_CHECK(k.size(i) == v.size(i), op, ": v must have k's batch, heads and tokens ", shape(k), ", got ", shape(v));
  return {k_view, v_view, dtype, k.size(0), k.size(1), k.size(2), k.size(3), v.size(3)};
}

// Are values that lie on a GPU (indices, starts, lengths, budgets) read back and checked? kvops.debug_checks() says so;
// one flag for each of the two libraries.
inline bool& debug_checks() {
  static bool on = false;
  return on;
}

// x where its values can be checked: itself on the CPU; a GPU's, copied here, or nothing, as debug_checks() says.
inline OptionalTensor readable(const Tensor& x) {
#if defined(USE_CUDA) || defined(KVOPS_CUDASIM)
  if (!debug_checks()) return std::nullopt;
  return torch::stable::to(x, torch::stable::Device(torch::headeronly::DeviceType::CPU));
#else
  return x;
#endif
}

// starts and lengths of a padded batch.
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
  const OptionalTensor start_values = starts ? readable(*starts) : starts;
  const OptionalTensor length_values = lengths ? readable(*lengths) : lengths;
  if (!start_values && !length_values) return slots;
  const auto at = [](const OptionalTensor& x, int64_t i) {
    return static_cast<const int32_t*>(x->const_data_ptr())[i];
  };
  for (int64_t i = 0; i < b; ++i) {
    const int64_t start = start_values ? at(start_values, i) : 0;
    const int64_t length = length_values ? at(length_values, i) : n - start;
    KVOPS_CHECK(start >= 0 && length >= 0 && start + length <= n, op, ": starts and lengths of row ", i,
                " must lie in [0, ", n, "], got start ", start, ", length ", length);
  }
  return slots;
}

// Do the rows of x overlap one another? True for expanded (stride 0) and for sliding-window views.
inline bool overlaps_itself(const Tensor& x) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) == 0) return false;
    if (x.size(i) > 1) dims.emplace_back(x.stride(i), x.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;  // elements from the first to one past the last of the dims so far
  for (const auto& [stride, size] : dims) {
    if (stride < span) return true;
    span += stride * (size - 1);
  }
  return false;
}

// Bytes from x's first element to behind its last; 0 if it has none.
inline int64_t extent(const Tensor& x) {
  int64_t span = 1;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) == 0) return 0;
    span += x.stride(i) * (x.size(i) - 1);
  }
  return span * static_cast<int64_t>(x.element_size());
}

// Do x and y share an element? Exact where their strides agree (K and V as slices of one buffer); otherwise they are
// said to overlap as soon as their extents do. Both must not overlap themselves.
inline bool overlaps(const Tensor& x, const Tensor& y) {
  struct Dim {
    int64_t stride, x_size, y_size;
  };
  const int64_t x_span = extent(x), y_span = extent(y);
  const int64_t offset = static_cast<const char*>(y.const_data_ptr()) - static_cast<const char*>(x.const_data_ptr());
  if (x_span == 0 || y_span == 0 || offset >= x_span || -offset >= y_span) return false;
  std::vector<Dim> dims;
  const int64_t item = static_cast<int64_t>(x.element_size());
  bool same_strides = x.element_size() == y.element_size() && x.dim() == y.dim();
  for (int64_t i = 0; same_strides && i < x.dim(); ++i) {
    if (x.size(i) == 1 && y.size(i) == 1) continue;
    same_strides = x.stride(i) == y.stride(i) || x.size(i) == 1 || y.size(i) == 1;
    dims.push_back({(x.size(i) > 1 ? x.stride(i) : y.stride(i)) * item, x.size(i), y.size(i)});
  }
  if (!same_strides) return true;
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  // Is offset = sum_i steps_i * stride_i + rest with |rest| < item? Inner dims span less than one outer stride, so two
  // candidates a dim suffice.
  auto reachable = [&](auto&& self, size_t i, int64_t left) -> bool {
    if (i == dims.size()) return -item < left && left < item;
    const int64_t steps = left >= 0 ? left / dims[i].stride : -((-left + dims[i].stride - 1) / dims[i].stride);
    for (int64_t s = steps; s <= steps + 1; ++s)
      if (-dims[i].y_size < s && s < dims[i].x_size && self(self, i + 1, left - s * dims[i].stride)) return true;
    return false;
  };
  return reachable(reachable, 0, offset);
}

// A target that is written: no overlap with itself or with the named other tensor.
inline void check_target(const char* op, const char* name, const Tensor& x, const char* other_name,
                         const Tensor& other) {
  KVOPS_CHECK(!overlaps_itself(x), op, ": ", name,
              " is written and must not overlap itself, got strides that do (an expanded tensor?)");
  KVOPS_CHECK(overlaps_itself(other) || !overlaps(x, other), op, ": ", name,
              " is written and must share no memory with ", other_name, ", got tensors that do");
}

// Memory that was not to be had. Python sees MemoryError, of a GPU's memory torch.OutOfMemoryError (kvops/dispatch.py).
class OutOfMemory : public std::bad_alloc {
 public:
  OutOfMemory(const char* op, int64_t bytes, const Tensor* on) {
    std::ostringstream text;
    const bool cuda = on && on->is_cuda();
    text << op << (cuda ? ": CUDA out of memory" : ": out of memory") << ", could not allocate " << bytes << " bytes";
    if (cuda) text << " on " << device(*on);
    text_ = text.str();
  }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// A fresh contiguous tensor on like's device: outputs, and on a GPU workspaces.
template <size_t N>
Tensor empty(const char* op, const Tensor& like, const std::array<int64_t, N>& sizes, ScalarType type) {
  std::array<int64_t, N> strides;
  int64_t size = 1;
  for (size_t i = N; i-- > 0;) {
    strides[i] = size;
    KVOPS_CHECK(sizes[i] == 0 || size <= std::numeric_limits<int64_t>::max() / 8 / sizes[i], op,
                ": the result has more elements than fit int64");
    size *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t device, dtype;
  int64_t item = 4;  // bytes
  aoti_torch_get_device_type(like.get(), &device);
  switch (type) {
    case ScalarType::Float:
      dtype = aoti_torch_dtype_float32();
      break;
    case ScalarType::Int:
      dtype = aoti_torch_dtype_int32();
      break;
    case ScalarType::Long:
      dtype = aoti_torch_dtype_int64();
      item = 8;
      break;
    case ScalarType::Half:
      dtype = aoti_torch_dtype_float16();
      item = 2;
      break;
    default:
      dtype = aoti_torch_dtype_bfloat16();
      item = 2;
  }
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(N, sizes.data(), strides.data(), dtype, device, like.get_device_index(), &handle))
    throw OutOfMemory(op, size * item, &like);
  return Tensor(handle);
}

}  // namespace kvops
