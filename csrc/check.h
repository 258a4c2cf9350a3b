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
#include <numeric>
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

// The bytes of a tensor: runs of `length` bytes from `begin` + sum of t * stride, 0 <= t < size for each of `dims`.
struct Runs {
  struct Dim {
    int64_t stride, size;  // bytes; steps
  };
  const char* begin;
  int64_t length;         // 0: no element
  std::vector<Dim> dims;  // sorted by stride, those that follow each other merged
  bool repeated = false;  // expanded: a stride is 0

  explicit Runs(const Tensor& x)
      : begin(static_cast<const char*>(x.const_data_ptr())), length(static_cast<int64_t>(x.element_size())) {
    std::vector<Dim> sorted;
    for (int64_t i = 0; i < x.dim(); ++i) {
      if (x.size(i) == 0) {
        length = 0;
        return;
      }
      repeated |= x.size(i) > 1 && x.stride(i) == 0;
      if (x.size(i) > 1 && x.stride(i) != 0)
        sorted.push_back({x.stride(i) * static_cast<int64_t>(x.element_size()), x.size(i)});
    }
    std::sort(sorted.begin(), sorted.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
    for (const Dim& dim : sorted) {
      if (dims.empty() && dim.stride == length) {
        length *= dim.size;
      } else if (!dims.empty() && dim.stride == dims.back().stride * dims.back().size) {
        dims.back().size *= dim.size;
      } else {
        dims.push_back(dim);
      }
    }
  }

  // From the first byte to behind the last.
  int64_t extent() const {
    int64_t bytes = length;
    for (const Dim& dim : dims) bytes += dim.stride * (dim.size - 1);
    return bytes;
  }
};

// Is there a sum of t * stride, first <= t <= last for each stride, in [low, high]? Outer strides first: what the inner
// ones span leaves one or two candidates where strides are nested, as those of slices are, and what no multiple of
// their greatest common divisor can be is left out. Where they are not, the search stops after kSteps and says yes.
class StrideSum {
 public:
  void add(int64_t stride, int64_t first, int64_t last) {
    for (Term& term : terms_)
      if (term.stride == stride) {
        term.first += first;
        term.last += last;
        return;
      }
    terms_.push_back({stride, first, last});
  }

  bool reaches(int64_t low, int64_t high) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.stride < b.stride; });
    Term all{0, 0, 0};
    for (Term& term : terms_) {
      all = {std::gcd(all.stride, term.stride), all.first + term.first * term.stride,
             all.last + term.last * term.stride};
      term.divisor = all.stride;
      term.least = all.first;
      term.most = all.last;
    }
    steps_ = 0;
    return reaches(terms_.size(), low, high);
  }

 private:
  static constexpr int kSteps = 1 << 14;
  struct Term {
    int64_t stride, first, last;
    int64_t divisor = 0, least = 0, most = 0;  // of this and the inner ones together
  };
  static int64_t floor_of(int64_t x, int64_t y) { return x / y - (x % y < 0); }

  // With the inner `count` terms.
  bool reaches(size_t count, int64_t low, int64_t high) {
    if (count == 0) return low <= 0 && 0 <= high;
    const Term& term = terms_[count - 1];
    low = std::max(low, term.least);
    high = std::min(high, term.most);
    if (low > high || floor_of(high, term.divisor) * term.divisor < low) return false;
    const int64_t least = count > 1 ? terms_[count - 2].least : 0, most = count > 1 ? terms_[count - 2].most : 0;
    const int64_t first = std::max(term.first, -floor_of(most - low, term.stride));
    const int64_t last = std::min(term.last, floor_of(high - least, term.stride));
    if (count == 1) return first <= last;
    for (int64_t t = first; t <= last; ++t)
      if (++steps_ > kSteps || reaches(count - 1, low - t * term.stride, high - t * term.stride)) return true;
    return false;
  }

  std::vector<Term> terms_;
  int steps_ = 0;
};

// Do two elements lie on each other? So in expanded and in sliding-window views.
inline bool overlaps_itself(const Runs& runs) {
  if (runs.length == 0 || runs.repeated) return runs.length != 0;
  // Two places differ by t steps of one dim, t >= 1, and by any number of steps of the dims inside of it.
  for (size_t i = 0; i < runs.dims.size(); ++i) {
    StrideSum difference;
    for (size_t j = 0; j < i; ++j) difference.add(runs.dims[j].stride, 1 - runs.dims[j].size, runs.dims[j].size - 1);
    // Its own t, less one.
    difference.add(runs.dims[i].stride, 0, runs.dims[i].size - 2);
    if (difference.reaches(1 - runs.length - runs.dims[i].stride, runs.length - 1 - runs.dims[i].stride)) return true;
  }
  return false;
}

inline bool overlaps(const Runs& x, const Runs& y) {
  const int64_t offset = y.begin - x.begin;
  if (x.length == 0 || y.length == 0 || offset >= x.extent() || -offset >= y.extent()) return false;
  StrideSum difference;  // of a run of y from one of x, less the offset
  for (const auto& dim : x.dims) difference.add(dim.stride, 1 - dim.size, 0);
  for (const auto& dim : y.dims) difference.add(dim.stride, 0, dim.size - 1);
  return difference.reaches(1 - y.length - offset, x.length - 1 - offset);
}

struct Named {
  std::string name;
  const Tensor& tensor;
};

// Every operator that writes to its arguments: what is `written` overlaps neither itself nor any other tensor of the
// call, written or `read`. By address, so that only those are compared whose extents meet.
inline void check_written(const char* op, const std::vector<Named>& written, const std::vector<Named>& read) {
  struct Place {
    const Named& named;
    Runs runs;
    bool written;
  };
  std::vector<Place> places;
  for (const Named& x : written) {
    places.push_back({x, Runs(x.tensor), true});
    KVOPS_CHECK(!overlaps_itself(places.back().runs), op, ": ", x.name,
                " is written and must not overlap itself, got strides that do (an expanded tensor?)");
  }
  for (const Named& x : read) places.push_back({x, Runs(x.tensor), false});
  std::vector<const Place*> by_address;
  for (const Place& x : places)
    if (x.runs.length) by_address.push_back(&x);
  std::sort(by_address.begin(), by_address.end(),
            [](const Place* a, const Place* b) { return a->runs.begin < b->runs.begin; });
  for (size_t i = 0; i < by_address.size(); ++i) {
    const char* const end = by_address[i]->runs.begin + by_address[i]->runs.extent();
    for (size_t j = i + 1; j < by_address.size() && by_address[j]->runs.begin < end; ++j) {
      const Place *x = by_address[i], *y = by_address[j];
      // The written one is named first; of two, the one that comes first in the call.
      if (!x->written || (y->written && y < x)) std::swap(x, y);
      KVOPS_CHECK(!x->written || !overlaps(x->runs, y->runs), op, ": ", x->named.name,
                  " is written and must share no memory with ", y->named.name, ", got tensors that do");
    }
  }
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
