// The passes of window_scores.cu, as window_attention.cu uses them too. All of them fill a window's results from shapes
// and pointers alone; workspace sizes are in bytes.
#pragma once
#include "../ops/window.h"
#include "device.cuh"

namespace kvops {

// The totals of each row (RowSum), [b, Hq, w]; with one row for each query head also the logits times log2(e), [b, Hq,
// n], unless that is null.
int64_t window_totals_workspace(const Window& p);
void window_totals(const Window& p, float2* totals, float* logits, void* workspace, cudaStream_t stream);

// The scores, from such totals: one read of K.
int64_t window_scores_pass_workspace(const Window& p);
void window_scores_pass(const Window& p, const float2* totals, void* workspace, cudaStream_t stream);

// The scores of one row for each query head, from such logits.
void window_row_scores(const Window& p, const float* logits, const float2* totals, cudaStream_t stream);

}  // namespace kvops
