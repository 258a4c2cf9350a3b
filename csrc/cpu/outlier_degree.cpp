// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include "../ops/outlier_degree.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(outlier_degree, OutlierDegreeParams)

namespace {

Tensor outlier_degree(const Tensor& k, int64_t kappa, bool standardize, const OptionalTensor& starts,
                      const OptionalTensor& lengths) {
  Tensor scores = k;
  const OutlierDegreeParams p = check_outlier_degree(k, kappa, standardize, starts, lengths, scores);
  const int64_t threads = threads_for(p.b * p.heads * p.n * p.k.row_bytes);
  const Scratch scratch("outlier_degree", OutlierScratch(p).moments + threads * OutlierScratch(p).worker);
  outlier_degree_cpu(p, scratch.workers(threads));
  return scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("outlier_degree", TORCH_BOX(&outlier_degree));
}

}  // namespace kvops
