#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "cluster_mean.cuh"

namespace kvops {
namespace {

Tensor cluster_mean(const Tensor& scores, const Tensor& assignment, int64_t num_clusters, int64_t reduce) {
  Tensor means = scores;
  const ClusterMeanParams p = check_cluster_mean(scores, assignment, num_clusters, reduce, means);
  const OnDevice device(scores);
  const Workspace workspace("cluster_mean", scores, bytes_of<ClusterMeanMemory>(p));
  cluster_mean_cuda(p, workspace.data(), device.stream());
  return means;
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("cluster_mean", TORCH_BOX(&cluster_mean));
}

}  // namespace kvops
