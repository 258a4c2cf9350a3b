// Mean score of each cluster on the CPU.
//
// Bytes that must move: scores and assignment, once from memory. A head is one work item. A first pass finds the
// largest score, which fixes the unit; a second adds the scores as integer multiples of that unit, exactly.
#include "../ops/cluster_mean.h"
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

void reduce_head(const ClusterMeanParams& p, int64_t index, int64_t* sums) {
  const ClusteredTokens& tokens = p.tokens;
  const int64_t b = index / tokens.heads, h = index % tokens.heads;
  const float* const scores = tokens.scores_row(b, h);
  const int32_t* const clusters = tokens.assignment_row(b, h);
  int32_t* const counts = reinterpret_cast<int32_t*>(sums + tokens.clusters);
  F most{};
  for (int64_t i = 0; i < tokens.n; i += VL) {
    const int64_t count = tokens.n - i < VL ? tokens.n - i : VL;
    I cluster = I{} - 1;
    memcpy(&cluster, clusters + i, 4 * count);
    const F score = load_first(scores + i, count, 0.0f), size = score < 0.0f ? -score : score;
    most = max(most, cluster >= 0 && size < __builtin_inff() ? size : F{});
  }
  float largest = 0;
  for (int i = 0; i < VL; ++i) largest = most[i] > largest ? most[i] : largest;
  const int shift = fixed_point_shift(largest, tokens.n);
  for (int64_t c = 0; c < tokens.clusters; ++c) sums[c] = 0, counts[c] = 0;
  for (int64_t i = 0; i < tokens.n; ++i) {
    const int32_t cluster = clusters[i];
    if (cluster < 0 || !is_finite(scores[i])) continue;
    sums[cluster] += to_fixed_point(scores[i], shift);
    ++counts[cluster];
  }
  float* const means = p.means + index * tokens.clusters;
  for (int64_t c = 0; c < tokens.clusters; ++c) means[c] = from_fixed_point(sums[c], shift, counts[c], p.sum);
}

// Floats of scratch per worker: an int64 sum and a count for each cluster.
inline int64_t scratch_of(const ClusterMeanParams& p) {
  return (3 * p.tokens.clusters + 15) / 16 * 16;
}

}  // namespace

void cluster_mean(const ClusterMeanParams& p, Call& call) {
  const Workers workers = workers_for(call, 16 * p.tokens.b * p.tokens.heads * p.tokens.n, scratch_of(p));
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Share heads = share(p.tokens.b * p.tokens.heads, worker, workers.count);
    float* const scratch = workers.workspace + worker * scratch_of(p);
    for (int64_t i = heads.first; i < heads.last; ++i) reduce_head(p, i, reinterpret_cast<int64_t*>(scratch));
  });
}

}  // namespace kvops::KVOPS_ISA
