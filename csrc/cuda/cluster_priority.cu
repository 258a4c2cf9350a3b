#include "cluster_priority.cuh"

namespace kvops {

void launch_cluster_priority(const ClusterPriorityParams& p, Call& call) {
  cluster_priority_cuda(p, call.workspace(bytes_of<ClusterPriorityMemory>(p)), stream_of(call));
}

}  // namespace kvops
