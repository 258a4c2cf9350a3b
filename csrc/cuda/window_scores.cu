#include "window_passes.h"
#include "window_scores.cuh"

namespace kvops {

void launch_window_scores(const WindowScoresParams& p, Call& call) {
  window_scores_cuda(p, call.workspace(bytes_of<WindowScoresMemory>(p)), stream_of(call));
}

int64_t window_totals_workspace(const Window& p) {
  return bytes_of<SumsMemory>(SumsPlan::of(p));
}

void window_totals(const Window& p, float2* totals, float* logits, void* workspace, cudaStream_t stream) {
  const SumsPlan plan = SumsPlan::of(p);
  RowSum* const partial_sums = static_cast<RowSum*>(workspace);
  window_sums_cuda(p, plan, partial_sums, logits, stream);
  window_totals_cuda(plan, partial_sums, reinterpret_cast<RowSum*>(totals), stream);
}

int64_t window_scores_pass_workspace(const Window& p) {
  return bytes_of<ScoresMemory>(p);
}

void window_scores_pass(const Window& p, const float2* totals, void* workspace, cudaStream_t stream) {
  const WindowScoresParams params{p, {nullptr, 0, 0, 0}, true};
  window_scores_pass_cuda(params, ScoresPlan::of(p), reinterpret_cast<const RowSum*>(totals),
                          static_cast<float*>(workspace), stream);
}

void window_row_scores(const Window& p, const float* logits, const float2* totals, cudaStream_t stream) {
  window_row_scores_cuda(p, logits, reinterpret_cast<const RowSum*>(totals), stream);
}

}  // namespace kvops
