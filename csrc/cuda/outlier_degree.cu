#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "outlier_degree.cuh"

namespace kvops {
namespace {

Tensor outlier_degree(const Tensor& k, int64_t kappa, bool standardize, const OptionalTensor& starts,
                      const OptionalTensor& lengths) {
  Tensor scores = k;
  const OutlierDegreeParams p = check_outlier_degree(k, kappa, standardize, starts, lengths, scores);
  check_head_dim("outlier_degree", "k", k);
  const OnDevice device(k);
  const Workspace workspace("outlier_degree", k, bytes_of<OutlierDegreeMemory>(p));
  outlier_degree_cuda(p, workspace.data(), device.stream());
  return scores;
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("outlier_degree", TORCH_BOX(&outlier_degree));
}

}  // namespace kvops
