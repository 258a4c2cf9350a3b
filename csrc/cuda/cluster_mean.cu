#include "cluster_mean.cuh"

namespace kvops {

void launch_cluster_mean(const ClusterMeanParams& p, Call& call) {
  cluster_mean_cuda(p, call.workspace(bytes_of<ClusterMeanMemory>(p)), stream_of(call));
}

}  // namespace kvops
