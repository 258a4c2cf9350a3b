// cluster_priority: parameters, launcher.
#pragma once
#include "cluster_mean.h"
#include "select_topk.h"

namespace kvops {

struct ClusterPriorityParams {
  ClusteredTokens tokens;
  const float* cluster_scores;  // [b, Hk, clusters]
  const int32_t* budgets;       // [b, Hk] or null: k
  float* priority;              // [b, Hk, n]
  int32_t* kept;                // [b, Hk]
  int64_t k;
  bool whole;
};

void launch_cluster_priority(const ClusterPriorityParams& p, Call& call);

}  // namespace kvops
