// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/select_topk.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(select_topk, SelectTopkParams)

namespace {

Tensor select_topk(const Tensor& scores, int64_t k, int64_t sinks, int64_t window, std::optional<int64_t> seq_len,
                   const OptionalTensor& starts, const OptionalTensor& lengths, const OptionalTensor& budgets,
                   bool fill_invalid) {
  Tensor indices = scores;
  const SelectTopkParams p =
      check_select_topk(scores, k, sinks, window, seq_len, starts, lengths, budgets, fill_invalid, indices);
  if (indices.numel() == 0) return indices;
  const int64_t threads = threads_for(32 * p.b * p.heads * p.n);  // a score costs what reading 32 bytes does
  const int64_t one = select_topk_scratch(p, 1) * threads, split = select_topk_scratch(p, threads);
  const Scratch scratch("select_topk", one > split ? one : split);
  select_topk_cpu(p, scratch.workers(threads));
  return indices;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("select_topk", TORCH_BOX(&select_topk));
}

}  // namespace kvops
