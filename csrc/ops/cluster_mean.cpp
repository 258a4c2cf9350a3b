// cluster_mean: checks arguments, allocates the output, launches.
#include "cluster_mean.h"

#include "../host.h"
#include "cluster_checks.h"

namespace kvops {
namespace {

Tensor cluster_mean(const Tensor& scores, const Tensor& assignment, int64_t num_clusters, int64_t reduce) {
  const char* op = "cluster_mean";
  constexpr int64_t kMost = int64_t{1} << 25;
  KVOPS_CHECK(num_clusters >= 1 && num_clusters <= kMost, op, ": num_clusters must be in [1, ", kMost, "], got ",
              num_clusters);
  const bool sum = check_reduce(op, "reduce", reduce, Reduce::mean) == Reduce::sum;
  const ClusteredTokens tokens = check_clustered_tokens(op, scores, assignment, num_clusters);
  const Tensor means = empty(op, scores, std::array{tokens.b, tokens.heads, num_clusters}, ScalarType::Float);
  const ClusterMeanParams p{.tokens = tokens, .means = static_cast<float*>(means.mutable_data_ptr()), .sum = sum};
  HostCall call(op, scores);
  launch_cluster_mean(p, call);
  return means;
}

}  // namespace

KVOPS_IMPL(m) {
  m.impl("cluster_mean", TORCH_BOX(&cluster_mean));
}

}  // namespace kvops
