// How the valid rows of all heads are divided among workers, for operators that score each row on its own.
#pragma once
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

// Calls fn(worker's scratch), and what it returns with (KV head, first row, end) for runs of at most `rows` rows that
// cover the valid slots of every KV head. Slots that are not valid get NaN in `out`, [b, Hk * group, n].
template <class Params, class Fn>
inline void for_runs(const Params& p, float* out, int64_t group, const Workers& workers, int64_t scratch, int64_t rows,
                     const Fn& fn) {
  const int64_t runs = (p.n + rows - 1) / rows;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    auto run = fn(workers.workspace + worker * scratch);
    const Share items = share(p.b * p.heads * runs, worker, workers.count);
    for (int64_t item = items.first; item < items.last; ++item) {
      const int64_t head = item / runs, b = head / p.heads;
      const int64_t first = p.slots.first(b), last = first + p.slots.count(b);
      if (item % runs == 0)
        for (int64_t g = 0; g < group; ++g) {
          float* const of_head = out + (head * group + g) * p.n;
          for (int64_t i = 0; i < first; ++i) of_head[i] = __builtin_nanf("");
          for (int64_t i = last; i < p.n; ++i) of_head[i] = __builtin_nanf("");
        }
      const int64_t begin = first + item % runs * rows, end = last - begin < rows ? last : begin + rows;
      if (begin < end) run(head, begin, end);
    }
  });
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
