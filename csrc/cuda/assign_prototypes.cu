#include "assign_prototypes.cuh"

namespace kvops {

void launch_assign_prototypes(const AssignPrototypesParams& p, Call& call) {
  assign_prototypes_cuda(p, call.workspace(assign_prototypes_workspace(p)), stream_of(call));
}

}  // namespace kvops
