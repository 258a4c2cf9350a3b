#include "outlier_degree.cuh"

namespace kvops {

void launch_outlier_degree(const OutlierDegreeParams& p, Call& call) {
  outlier_degree_cuda(p, call.workspace(bytes_of<OutlierDegreeMemory>(p)), stream_of(call));
}

}  // namespace kvops
