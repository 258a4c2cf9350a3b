// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/assign_prototypes.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(assign_prototypes, AssignPrototypesParams)

namespace {

Tensor assign_prototypes(const Tensor& k, const Tensor& prototypes, const OptionalTensor& starts,
                         const OptionalTensor& lengths) {
  Tensor assignment = k;
  const AssignPrototypesParams p = check_assign_prototypes(k, prototypes, starts, lengths, assignment);
  // 32 products take about as long as reading a byte.
  const int64_t threads = threads_for(p.b * p.heads * p.n * p.d * (p.count / 32 + 1));
  const Scratch scratch("assign_prototypes", threads * AssignScratch(p).worker);
  assign_prototypes_cpu(p, scratch.workers(threads));
  return assignment;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("assign_prototypes", TORCH_BOX(&assign_prototypes));
}

}  // namespace kvops
