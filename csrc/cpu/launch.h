// What every cpu/<op>.cpp does around its body: torch's threads, scratch memory, outputs.
#pragma once
#include <sys/mman.h>

#include "../check.h"
#include "isa.h"

namespace kvops {

// Threads for a call that touches `bytes`: one where starting the others costs more than the work.
inline int64_t threads_for(int64_t bytes) {
  return bytes < (int64_t{1} << 20) ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
}

// `floats` of uninitialized scratch, aligned to a vector register; freed on return.
class Scratch {
 public:
  Scratch(const char* op, int64_t floats)
      : data_(static_cast<float*>(operator new(floats * sizeof(float), std::align_val_t{64}, std::nothrow))) {
    if (!data_) throw OutOfMemory(op, floats * static_cast<int64_t>(sizeof(float)), nullptr);
  }
  Scratch() = default;
  ~Scratch() { operator delete(data_, std::align_val_t{64}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  Workers workers(int64_t threads) const { return {torch_parallel_for, threads, data_}; }

 private:
  float* data_ = nullptr;
};

// A fresh contiguous tensor of like's dtype. The first touch of fresh memory costs a page fault a page, more than
// writing the rows: it asks for huge pages.
inline Tensor empty_huge(const char* op, const Tensor& like, const std::array<int64_t, 4>& sizes) {
  const Tensor out = empty(op, like, sizes, like.scalar_type());
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (begin + out.numel() * out.element_size()) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return out;
}

}  // namespace kvops
