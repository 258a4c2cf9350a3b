// What the launchers of window_scores, window_attention and assign_prototypes ask of the Hopper kernels. Each function
// does its pass and returns true, or does nothing and returns false: not built, not wanted (KVOPS_SM90), another GPU,
// or a call that it does not serve. Then the portable kernel does the pass; both read and write the same.
#pragma once
#include "../../ops/assign_prototypes.h"
#include "../../ops/window_scores.h"
#include "../device.cuh"

namespace kvops::sm90 {

#ifdef KVOPS_SM90
// The scores, of rows whose totals, [b, Hq, w], are known: the largest logit, times log2(e), and the sum of 2^(logit -
// it); or if these are null, whose lse is.
bool window_scores(const Window& p, const LseView& lse, const float2* totals, cudaStream_t stream);

// Of each row and each split, split_keys keys from the first valid slot + split * split_keys on, the largest logit,
// times log2(e), and the sum of 2^(logit - it). v null: sums are [b * heads, splits, rows]. Else v is [b, heads, n,
// dv], sums are [b * heads, rows, splits], and `out`, [.., dv], gets the sum of 2^(logit - it) v. logits: null, or with
// v [b * heads, rows, n], to get the logits, times log2(e), of the keys that a row sees.
bool window_pass(const Window& p, const KVView* v, int64_t splits, int64_t split_keys, float2* sums, float* out,
                 float* logits, cudaStream_t stream);

// The assignment. units: the prototypes as unit vectors of k's dtype, [b, heads, rows, d], 0 for those that cannot win.
bool assign_prototypes(const AssignPrototypesParams& p, const KVView& units, int64_t rows, cudaStream_t stream);
#else
inline bool window_scores(const Window&, const LseView&, const float2*, cudaStream_t) {
  return false;
}
inline bool window_pass(const Window&, const KVView*, int64_t, int64_t, float2*, float*, float*, cudaStream_t) {
  return false;
}
inline bool assign_prototypes(const AssignPrototypesParams&, const KVView&, int64_t, cudaStream_t) {
  return false;
}
#endif

}  // namespace kvops::sm90
