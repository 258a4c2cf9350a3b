// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/cluster_mean.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(cluster_mean, ClusterMeanParams)

namespace {

Tensor cluster_mean(const Tensor& scores, const Tensor& assignment, int64_t num_clusters, int64_t reduce) {
  Tensor means = scores;
  const ClusterMeanParams p = check_cluster_mean(scores, assignment, num_clusters, reduce, means);
  const int64_t threads = threads_for(16 * p.tokens.b * p.tokens.heads * p.tokens.n);
  const Scratch scratch("cluster_mean", threads * cluster_mean_scratch(p));
  cluster_mean_cpu(p, scratch.workers(threads));
  return means;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("cluster_mean", TORCH_BOX(&cluster_mean));
}

}  // namespace kvops
