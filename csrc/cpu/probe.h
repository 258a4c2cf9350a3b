// Probes of the memory system for kvops.bench: the best speed at which bytes can be read, copied, and moved in place.
#include <cstddef>

#include "probe_params.h"
#include "rows.h"

namespace kvops::KVOPS_ISA {
namespace {

inline float simd_sum(const float* x, int64_t n) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += x[i];
  return total;
}

inline float four_accumulators(const float* x, int64_t n) {
  F total[4] = {};
  int64_t i = 0;
  for (; i + 4 * VL <= n; i += 4 * VL)
    for (int j = 0; j < 4; ++j) total[j] += load(x + i + j * VL);
  float rest = sum(total[0] + total[1] + total[2] + total[3]);
  for (; i < n; ++i) rest += x[i];
  return rest;
}

// Sums each page while prefetching the next.
inline float sum_of_pages(const char* source, const int32_t* places, int64_t count, int64_t bytes) {
  F total[256 / VB] = {};
  for (int64_t page = 0; page < count; ++page) {
    const char* const from = source + places[page] * bytes;
    const char* const next = source + places[page + 1 < count ? page + 1 : page] * bytes;
    for (int64_t i = 0; i < bytes; i += 256) {
      prefetch_row(next + i, 256);
      for (int j = 0; j < 256 / VB; ++j) total[j] += load(reinterpret_cast<const float*>(from + i + j * VB));
    }
  }
  float all = 0;
  for (const F& x : total) all += sum(x);
  return all;
}

}  // namespace

void probe(const ProbeParams& p, Call& call) {
  const Workers workers{call.run, call.threads, nullptr};
  constexpr int64_t kUnit = 64;  // a cache line
  const int64_t lines = p.bytes / kUnit;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Share mine = share(lines, worker, workers.count);
    const char* from = p.source + mine.first * kUnit;
    char* to = p.target ? p.target + mine.first * kUnit : nullptr;
    const int64_t bytes = (mine.last - mine.first) * kUnit;
    switch (p.kind) {
      case Probe::simd_sum:
        p.sums[worker] = simd_sum(reinterpret_cast<const float*>(from), bytes / 4);
        break;
      case Probe::four_accumulators:
        p.sums[worker] = four_accumulators(reinterpret_cast<const float*>(from), bytes / 4);
        break;
      case Probe::pages: {
        const Share pages = share(p.bytes / p.page_bytes, worker, workers.count);
        p.sums[worker] = sum_of_pages(p.source, p.places + pages.first, pages.last - pages.first, p.page_bytes);
        break;
      }
      case Probe::copy:
        memcpy(to, from, bytes);
        break;
      case Probe::stream:
        for (int64_t i = 0; i < bytes; i += VB) {
          U x;
          memcpy(&x, from + i, VB);
          KVOPS_STREAM(to + i, x);
        }
        stream_fence();
        break;
      case Probe::shift:
        for (int64_t i = 0; i < bytes; i += VB) {
          U x;
          memcpy(&x, from + i, VB);
          memcpy(to + i, &x, VB);
        }
        break;
    }
  });
}

}  // namespace kvops::KVOPS_ISA
