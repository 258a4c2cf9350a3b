// One operator call, as seen by its launchers: launch_<op>(params, call) in cpu/<op>.cpp and cuda/<op>.cu. The host
// body creates it (host.h). This header includes nothing from torch, whose headers would add seconds to the compile
// time of each kernel file.
#pragma once

#include <cstdint>

namespace kvops {

struct Call {
  const char* op;
  void* stream = nullptr;  // GPU: torch's current stream; its device is the current device
  // CPU: the number of torch threads, and a function that runs body(begin, end, context) on them over parts of a range.
  int64_t threads = 1;
  int32_t (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                 void* context) = nullptr;

  // Uninitialized memory for this call, aligned to 16 bytes (64 on the CPU). Request it at most once per call. On a
  // GPU, later work in the same stream may reuse it. Null for 0 bytes.
  virtual void* workspace(int64_t bytes) = 0;

 protected:
  explicit Call(const char* op_) : op(op_) {}
  ~Call() = default;
};

}  // namespace kvops
