#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "cluster_priority.cuh"

namespace kvops {
namespace {

std::tuple<Tensor, Tensor> cluster_priority(const Tensor& scores, const Tensor& assignment,
                                            const Tensor& cluster_scores, int64_t k, const OptionalTensor& budgets,
                                            bool whole) {
  Tensor priority = scores, kept = scores;
  const ClusterPriorityParams p =
      check_cluster_priority(scores, assignment, cluster_scores, k, budgets, whole, priority, kept);
  const OnDevice device(scores);
  const Workspace workspace("cluster_priority", scores, bytes_of<ClusterPriorityMemory>(p));
  cluster_priority_cuda(p, workspace.data(), device.stream());
  return {priority, kept};
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("cluster_priority", TORCH_BOX(&cluster_priority));
}

}  // namespace kvops
