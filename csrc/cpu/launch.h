// What every cpu/<op>.cpp does around its body: torch's threads and scratch memory.
#pragma once
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
  explicit Scratch(int64_t floats)
      : data_(floats ? static_cast<float*>(operator new(floats * sizeof(float), std::align_val_t{64})) : nullptr) {}
  ~Scratch() { operator delete(data_, std::align_val_t{64}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  Workers workers(int64_t threads) const { return {torch_parallel_for, threads, data_}; }

 private:
  float* data_;
};

}  // namespace kvops
