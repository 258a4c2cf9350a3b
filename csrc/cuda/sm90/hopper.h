// What the launchers of window_scores and window_attention ask of the Hopper kernels. Each function does its pass and
// returns true, or does nothing and returns false: not built, not wanted (KVOPS_SM90), another GPU, or a call that it
// does not serve. Then the portable kernel does the pass; both read and write the same.
#pragma once
#include "../../ops/window_scores.h"
#include "../device.cuh"

namespace kvops::sm90 {

#ifdef KVOPS_SM90
// The scores, of rows whose lse is known.
bool window_scores(const Window& p, const LseView& lse, cudaStream_t stream);

// Of each row and each run of split_keys keys, from the first valid slot on, the largest logit, times log2(e), and the
// sum of 2^(logit - it), [b * heads, splits, rows]; and if v is given, [b, heads, n, dv], the sum of 2^(logit - it) v,
// [b * heads, splits, rows, dv].
bool window_pass(const Window& p, const KVView* v, int64_t splits, int64_t split_keys, float2* sums, float* out,
                 cudaStream_t stream);
#else
inline bool window_scores(const Window&, const LseView&, cudaStream_t) {
  return false;
}
inline bool window_pass(const Window&, const KVView*, int64_t, int64_t, float2*, float*, cudaStream_t) {
  return false;
}
#endif

}  // namespace kvops::sm90
