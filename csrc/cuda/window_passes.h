// The passes of window_scores.cu, which window_attention.cu uses too, and that of window_attention.cu, which
// drop_scores.cu uses. They need nothing but the shapes and pointers in their parameters. Workspace sizes are in bytes.
#pragma once
#include "../ops/window_attention.h"
#include "device.cuh"

namespace kvops {

// The totals of each row (RowSum), [b, Hq, w]; with one row per query head also the logits times log2(e), [b, Hq, n],
// unless that pointer is null.
int64_t window_totals_workspace(const Window& p);
void window_totals(const Window& p, float2* totals, float* logits, void* workspace, cudaStream_t stream);

// The scores, from such totals: reads K once.
int64_t window_scores_pass_workspace(const Window& p);
void window_scores_pass(const Window& p, const float2* totals, void* workspace, cudaStream_t stream);

// The scores of one row per query head, from such logits.
void window_row_scores(const Window& p, const float* logits, const float2* totals, cudaStream_t stream);

// The outputs, in fp32 at p.out, the lse and the totals: reads K and V once. Without RoPE. Where weights are rounded to
// 16 bits for the tensor cores, the totals are the sums of the rounded weights.
int64_t window_outputs_workspace(const WindowAttentionParams& p);
void window_outputs(const WindowAttentionParams& p, float2* totals, void* workspace, cudaStream_t stream);

}  // namespace kvops
