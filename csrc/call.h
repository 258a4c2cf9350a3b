// One call of an operator, as its launchers see it: launch_<op>(params, call) in cpu/<op>.cpp and in cuda/<op>.cu. The
// host body makes it (host.h). It names nothing of torch, whose headers cost a kernel's file seconds.
#pragma once

#include <cstdint>

namespace kvops {

struct Call {
  const char* op;
  void* stream = nullptr;  // on a GPU: torch's current stream; its device is the current one
  // On the CPU: torch's threads, and body(begin, end, context) on them for parts of a range.
  int64_t threads = 1;
  int32_t (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                 void* context) = nullptr;

  // Uninitialized memory for this call, from a multiple of 16 bytes on (on the CPU, of 64); to be asked for once. What
  // runs later in a GPU's stream may get it again. Null for 0 bytes.
  virtual void* workspace(int64_t bytes) = 0;

 protected:
  explicit Call(const char* op_) : op(op_) {}
  ~Call() = default;
};

}  // namespace kvops
