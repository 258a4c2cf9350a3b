#include <torch/csrc/stable/c/shim.h>

#include <chrono>
#include <vector>

#include "isa.h"
#include "probe_params.h"

KVOPS_LEVELS(probe, ProbeParams)

namespace kvops {
namespace {

struct ProbeCall final : Call {
  explicit ProbeCall(int threads_) : Call("probe") {
    threads = threads_;
    run = torch_parallel_for;
  }
  void* workspace(int64_t) override { return nullptr; }
};

double seconds(ProbeParams p, int threads) {
  std::vector<float> sums(threads);
  p.sums = sums.data();
  ProbeCall call(threads);
  const auto start = std::chrono::steady_clock::now();
  launch_probe(p, call);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace
}  // namespace kvops

// Returns the seconds of one pass. Plain C, called through ctypes, so the Python lock is not held.
extern "C" __attribute__((visibility("default"))) double kvops_probe_read(const void* source, size_t bytes, int kind,
                                                                          int threads) {
  return kvops::seconds({static_cast<kvops::Probe>(kind), static_cast<const char*>(source), nullptr,
                         static_cast<int64_t>(bytes), nullptr},
                        threads);
}

// Reads the `count` pages at `places`.
extern "C" __attribute__((visibility("default"))) double kvops_probe_pages(const void* source, const void* places,
                                                                           size_t count, int page_bytes, int threads) {
  return kvops::seconds(
      {kvops::Probe::pages, static_cast<const char*>(source), nullptr, static_cast<int64_t>(count) * page_bytes,
       nullptr, static_cast<const int32_t*>(places), page_bytes},
      threads);
}

// kind 0: memcpy; 1: streaming stores; 2: a plain forward loop, for source and target in the same tensor. For timing
// only: in an overlapping move the threads overwrite each other's sources.
extern "C" __attribute__((visibility("default"))) double kvops_probe_copy(void* target, const void* source,
                                                                          size_t bytes, int kind, int threads) {
  return kvops::seconds({static_cast<kvops::Probe>(kind + 2), static_cast<const char*>(source),
                         static_cast<char*>(target), static_cast<int64_t>(bytes), nullptr},
                        threads);
}
