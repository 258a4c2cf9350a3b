#include "assign_prototypes.cuh"
#include "hopper.h"
#include "key_similarity.cuh"
#include "value_norm.cuh"
#include "window_attention.cuh"
#include "window_scores.cuh"

namespace kvops::sm90 {

bool window_scores(const Window& p, const RowValues& lse, const float2* totals, cudaStream_t stream) {
  return window_scores_hopper(p, lse, reinterpret_cast<const RowSum*>(totals), stream);
}

bool window_pass(const Window& p, const KVView* v, int64_t splits, int64_t split_keys, float2* sums, float* out,
                 float* logits, cudaStream_t stream) {
  return window_pass_hopper(p, v, splits, split_keys, sums, out, logits, stream);
}

bool assign_prototypes(const AssignPrototypesParams& p, const KVView& units, int64_t rows, cudaStream_t stream) {
  return assign_prototypes_hopper(p, units, rows, stream);
}

bool last_similar(const KeySimilarityParams& p, const KVView& keys, DType dtype, int64_t rows, const float* inverses,
                  unsigned long long* spared, cudaStream_t stream) {
  return last_similar_hopper(p, keys, dtype, rows, inverses, spared, stream);
}

bool query_head_norms(const ValueNormParams& p, float* norms, cudaStream_t stream) {
  return query_head_norms_hopper(p, norms, stream);
}

}  // namespace kvops::sm90
