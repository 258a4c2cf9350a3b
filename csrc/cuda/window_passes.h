// The passes of window_scores.cu, which window_attention.cu uses too. They need nothing but the shapes and pointers in
// Window. Workspace sizes are in bytes.
#pragma once
#include "../ops/window.h"
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

}  // namespace kvops
