#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "anchor_cosine.cuh"

namespace kvops {
namespace {

std::tuple<Tensor, Tensor> anchor_cosine(const Tensor& k, const OptionalTensor& anchor, bool normalize_anchor,
                                         const OptionalTensor& starts, const OptionalTensor& lengths) {
  Tensor scores = k, anchor_out = k;
  const AnchorCosineParams p = check_anchor_cosine(k, anchor, normalize_anchor, starts, lengths, scores, anchor_out);
  check_head_dim("anchor_cosine", "k", k);
  const OnDevice device(k);
  const Workspace workspace("anchor_cosine", k, bytes_of<AnchorMemory>(p));
  anchor_cosine_cuda(p, workspace.data(), device.stream());
  return {scores, anchor_out};
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("anchor_cosine", TORCH_BOX(&anchor_cosine));
}

}  // namespace kvops
