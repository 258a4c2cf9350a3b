// cluster_priority: checks arguments, allocates outputs, launches.
#include "cluster_priority.h"

#include "../host.h"
#include "cluster_checks.h"

namespace kvops {
namespace {

std::tuple<Tensor, Tensor> cluster_priority(const Tensor& scores, const Tensor& assignment,
                                            const Tensor& cluster_scores, int64_t k, const OptionalTensor& budgets,
                                            bool whole) {
  const char* op = "cluster_priority";
  check_same_device(op, "cluster_scores", cluster_scores, scores);
  check_scalar_type(op, "cluster_scores", cluster_scores, ScalarType::Float);
  KVOPS_CHECK(scores.dim() == 3, op, ": scores must be [batch, heads, tokens], got ", shape(scores));
  const int64_t b = scores.size(0), heads = scores.size(1);
  KVOPS_CHECK(cluster_scores.dim() == 3 && cluster_scores.size(0) == b && cluster_scores.size(1) == heads &&
                  cluster_scores.size(2) >= 1 && cluster_scores.is_contiguous(),
              op, ": cluster_scores must be a contiguous [", b, ", ", heads, ", at least 1], got ",
              shape(cluster_scores));
  KVOPS_CHECK(k >= 0, op, ": k must be >= 0, got ", k);
  const ClusteredTokens tokens = check_clustered_tokens(op, scores, assignment, cluster_scores.size(2));
  const int32_t* budget = budgets ? check_budgets(op, *budgets, scores, 0, k) : nullptr;
  const Tensor priority = empty(op, scores, std::array{b, heads, tokens.n}, ScalarType::Float);
  const Tensor kept = empty(op, scores, std::array{b, heads}, ScalarType::Int);
  const ClusterPriorityParams p{.tokens = tokens,
                                .cluster_scores = static_cast<const float*>(cluster_scores.const_data_ptr()),
                                .budgets = budget,
                                .priority = static_cast<float*>(priority.mutable_data_ptr()),
                                .kept = static_cast<int32_t*>(kept.mutable_data_ptr()),
                                .k = k,
                                .whole = whole};
  HostCall call(op, scores);
  launch_cluster_priority(p, call);
  return {priority, kept};
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("cluster_priority", TORCH_BOX(&cluster_priority));
}

}  // namespace kvops
