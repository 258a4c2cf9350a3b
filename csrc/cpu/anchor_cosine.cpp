// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/anchor_cosine.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(anchor_cosine, AnchorCosineParams)

namespace {

std::tuple<Tensor, Tensor> anchor_cosine(const Tensor& k, const OptionalTensor& anchor, bool normalize_anchor,
                                         const OptionalTensor& starts, const OptionalTensor& lengths) {
  Tensor scores = k, anchor_out = k;
  const AnchorCosineParams p = check_anchor_cosine(k, anchor, normalize_anchor, starts, lengths, scores, anchor_out);
  const int64_t threads = threads_for(p.b * p.heads * p.n * p.k.row_bytes);
  const Scratch scratch("anchor_cosine", anchor_cosine_scratch(p, threads));
  anchor_cosine_cpu(p, scratch.workers(threads));
  return {scores, anchor_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("anchor_cosine", TORCH_BOX(&anchor_cosine));
}

}  // namespace kvops
