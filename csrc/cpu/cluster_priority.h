// Token priorities that keep clusters whole, on the CPU.
//
// Bytes that must move: scores, assignment and priority, once. A head is one work item: count the tokens of each
// cluster; for each cluster count the tokens of the better ones (this compares every pair, a vector at a time, and
// beats sorting up to thousands of clusters); then one pass over the tokens.
#include "../ops/cluster_priority.h"
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

// Floats of scratch per worker: for each cluster a sort key, a size and the priority of its tokens.
inline int64_t scratch_of(const ClusterPriorityParams& p) {
  return 3 * ((p.tokens.clusters + 15) / 16 * 16);
}

// The number of tokens in those of clusters [first, last) whose key is at least `least`.
int64_t tokens_of(const uint32_t* keys, const int32_t* sizes, int64_t first, int64_t last, uint32_t least) {
  int32_t total = 0;
  for (int64_t c = first; c < last; ++c) total += keys[c] >= least ? sizes[c] : 0;
  return total;
}

void rank_head(const ClusterPriorityParams& p, int64_t index, float* scratch) {
  const ClusteredTokens& tokens = p.tokens;
  const int64_t b = index / tokens.heads, h = index % tokens.heads, clusters = tokens.clusters;
  const float* const scores = tokens.scores_row(b, h);
  const int32_t* const cluster = tokens.assignment_row(b, h);
  const float* const cluster_scores = p.cluster_scores + index * clusters;
  const int64_t pitch = scratch_of(p) / 3;
  uint32_t* const keys = reinterpret_cast<uint32_t*>(scratch);
  int32_t* const sizes = reinterpret_cast<int32_t*>(scratch + pitch);
  float* const fate = scratch + 2 * pitch;  // the priority of a cluster's tokens; NaN: each token's own score

  for (int64_t c = 0; c < clusters; c += VL) {
    const U key = order_key(load_first(cluster_scores + c, clusters - c < VL ? clusters - c : VL, 0.0f));
    memcpy(keys + c, &key, VB);
  }
  memset(sizes, 0, 4 * clusters);
  for (int64_t i = 0; i < tokens.n; ++i)
    if (cluster[i] >= 0) ++sizes[cluster[i]];

  const int64_t budget = p.budgets ? p.budgets[index] : p.k;
  int64_t kept = 0;
  for (int64_t c = 0; c < clusters; ++c) {
    // On ties the lower cluster comes first. No key is 2^32 - 1, so keys[c] + 1 does not overflow.
    const int64_t before = tokens_of(keys, sizes, 0, c, keys[c]) + tokens_of(keys, sizes, c + 1, clusters, keys[c] + 1);
    if (before + sizes[c] <= budget) {
      fate[c] = __builtin_inff();
      kept += sizes[c];
    } else if (before >= budget || p.whole) {
      fate[c] = -__builtin_inff();
    } else {
      fate[c] = __builtin_nanf("");
      kept += budget - before;
    }
  }
  p.kept[index] = static_cast<int32_t>(kept);

  constexpr float kLowest = -0x1.fffffep127f;
  float* const priority = p.priority + index * tokens.n;
  for (int64_t i = 0; i < tokens.n; ++i) {
    const float own = is_finite(scores[i]) ? scores[i] : kLowest;
    const float given = cluster[i] >= 0 ? fate[cluster[i]] : __builtin_nanf("");
    priority[i] = given == given || cluster[i] < 0 ? given : own;
  }
}

}  // namespace

void cluster_priority(const ClusterPriorityParams& p, Call& call) {
  const int64_t bytes = p.tokens.b * p.tokens.heads * (16 * p.tokens.n + p.tokens.clusters * p.tokens.clusters);
  const Workers workers = workers_for(call, bytes, scratch_of(p));
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Share heads = share(p.tokens.b * p.tokens.heads, worker, workers.count);
    float* const scratch = workers.workspace + worker * scratch_of(p);
    for (int64_t i = heads.first; i < heads.last; ++i) rank_head(p, i, scratch);
  });
}

}  // namespace kvops::KVOPS_ISA
