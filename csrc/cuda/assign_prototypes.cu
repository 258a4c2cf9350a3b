#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "assign_prototypes.cuh"

namespace kvops {
namespace {

Tensor assign_prototypes(const Tensor& k, const Tensor& prototypes, const OptionalTensor& starts,
                         const OptionalTensor& lengths) {
  Tensor assignment = k;
  const AssignPrototypesParams p = check_assign_prototypes(k, prototypes, starts, lengths, assignment);
  check_head_dim("assign_prototypes", "k", k);
  const OnDevice device(k);
  const Workspace workspace("assign_prototypes", k, assign_prototypes_workspace(p));
  assign_prototypes_cuda(p, workspace.data(), device.stream());
  return assignment;
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("assign_prototypes", TORCH_BOX(&assign_prototypes));
}

}  // namespace kvops
