// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/cluster_priority.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(cluster_priority, ClusterPriorityParams)

namespace {

std::tuple<Tensor, Tensor> cluster_priority(const Tensor& scores, const Tensor& assignment,
                                            const Tensor& cluster_scores, int64_t k, const OptionalTensor& budgets,
                                            bool whole) {
  Tensor priority = scores, kept = scores;
  const ClusterPriorityParams p =
      check_cluster_priority(scores, assignment, cluster_scores, k, budgets, whole, priority, kept);
  const int64_t threads =
      threads_for(p.tokens.b * p.tokens.heads * (16 * p.tokens.n + p.tokens.clusters * p.tokens.clusters));
  const Scratch scratch("cluster_priority", threads * cluster_priority_scratch(p));
  cluster_priority_cpu(p, scratch.workers(threads));
  return {priority, kept};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("cluster_priority", TORCH_BOX(&cluster_priority));
}

}  // namespace kvops
