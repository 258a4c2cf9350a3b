// Detects tensors of a call that share memory. Operators that write to their arguments reject them.
#pragma once

#include <algorithm>
#include <numeric>

#include "check.h"

namespace kvops {

// The bytes of a tensor: runs of `length` bytes that begin at `begin` + sum of t * stride, 0 <= t < size, over all
// `dims`.
struct Runs {
  struct Dim {
    int64_t stride, size;  // bytes; steps
  };
  const char* begin;
  int64_t length;         // 0: no elements
  std::vector<Dim> dims;  // sorted by stride; adjacent dims are merged
  bool repeated = false;  // expanded: some stride is 0

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

  // Bytes from the first to one past the last.
  int64_t extent() const {
    int64_t bytes = length;
    for (const Dim& dim : dims) bytes += dim.stride * (dim.size - 1);
    return bytes;
  }
};

// Whether some sum of t * stride, first <= t <= last for each stride, lies in [low, high]. The search tries outer
// strides first. For nested strides, as slices have, the span of the inner strides leaves one or two candidates; ranges
// that contain no multiple of the inner strides' greatest common divisor are pruned. For other strides the search gives
// up after kSteps and answers yes.
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
    int64_t divisor = 0, least = 0, most = 0;  // of this term and the inner ones together
  };
  static int64_t floor_of(int64_t x, int64_t y) { return x / y - (x % y < 0); }

  // Considers the `count` innermost terms.
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

// Whether two elements share memory, as in expanded and sliding-window views.
inline bool overlaps_itself(const Runs& runs) {
  if (runs.length == 0 || runs.repeated) return runs.length != 0;
  // Two runs differ by t >= 1 steps of one dim and by any number of steps of the dims inside it.
  for (size_t i = 0; i < runs.dims.size(); ++i) {
    StrideSum difference;
    for (size_t j = 0; j < i; ++j) difference.add(runs.dims[j].stride, 1 - runs.dims[j].size, runs.dims[j].size - 1);
    // The dim's own t, minus one.
    difference.add(runs.dims[i].stride, 0, runs.dims[i].size - 2);
    if (difference.reaches(1 - runs.length - runs.dims[i].stride, runs.length - 1 - runs.dims[i].stride)) return true;
  }
  return false;
}

inline bool overlaps(const Runs& x, const Runs& y) {
  const int64_t offset = y.begin - x.begin;
  if (x.length == 0 || y.length == 0 || offset >= x.extent() || -offset >= y.extent()) return false;
  StrideSum difference;  // from a run of x to a run of y, minus the offset
  for (const auto& dim : x.dims) difference.add(dim.stride, 1 - dim.size, 0);
  for (const auto& dim : y.dims) difference.add(dim.stride, 0, dim.size - 1);
  return difference.reaches(1 - y.length - offset, x.length - 1 - offset);
}

struct Named {
  std::string name;
  const Tensor& tensor;
};

// For every operator that writes to its arguments: a `written` tensor must not overlap itself or any other tensor of
// the call, written or `read`. Tensors are sorted by address, so only those with intersecting extents are compared.
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
                " is written to and must not overlap itself, got strides that do (an expanded tensor?)");
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
      // Name the written tensor first; if both are, the one that comes first in the call.
      if (!x->written || (y->written && y < x)) std::swap(x, y);
      KVOPS_CHECK(!x->written || !overlaps(x->runs, y->runs), op, ": ", x->named.name,
                  " is written to and must share no memory with ", y->named.name, ", got tensors that overlap");
    }
  }
}

}  // namespace kvops
