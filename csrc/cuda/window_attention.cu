#include "../ops/rope_at_slots.h"
#include "window_attention.cuh"
#include "window_passes.h"

namespace kvops {
namespace {

// The workspace of a call.
struct WindowAttentionMemory {
  float* parts;    // [b, Hq, w, parts, dv]
  RowSum* sums;    // [b, Hq, w, parts]
  float2* totals;  // [b, Hq, w], each a RowSum
  float* logits;   // [b, Hq, n], for one row per query head, from which its scores follow; or null
  char* passes;    // for window_scores' passes, one after the other
  char* turned;    // [b, Hk, n, d], keys that are rotated beforehand
  char* widened;   // [b, Hk, n, dv], the values beside them, if they are fp8
  float* biases;   // [b, Hk, n], beside them too, if they are in pages

  WindowAttentionMemory(const WindowAttentionParams& p, const AttentionPlan& plan, Sections& sections) {
    const Window& w = p.window;
    const int64_t rows = w.b * w.heads * w.group * w.w;
    const int64_t sums_pass = plan.tensor_cores ? 0 : window_totals_workspace(w),
                  scores = w.scores ? window_scores_pass_workspace(w) : 0;
    parts = sections.add<float>(rows * plan.parts * p.dv);
    sums = sections.add<RowSum>(rows * plan.parts);
    totals = sections.add<float2>(rows);
    logits = w.w == 1 && w.scores ? sections.add<float>(rows * w.n) : nullptr;
    passes = sections.add<char>(sums_pass > scores ? sums_pass : scores);
    const int64_t turns_before = w.rope.pairs && !plan.turns ? w.b * w.heads * w.n : 0;
    turned = sections.add<char>(turns_before * w.k.row_bytes);
    widened = sections.add<char>(w.stored == w.dtype ? 0 : turns_before * p.v.row_bytes);
    biases = sections.add<float>(w.key_bias.table ? turns_before : 0);
  }
};

// The workspace of the outputs alone.
struct OutputsMemory {
  float* parts;  // [b, Hq, w, parts, dv]
  RowSum* sums;  // [b, Hq, w, parts]
  char* totals;  // for window_totals

  OutputsMemory(const WindowAttentionParams& p, const AttentionPlan& plan, Sections& sections) {
    const int64_t rows = p.window.b * p.window.heads * p.window.group * p.window.w;
    parts = sections.add<float>(rows * plan.parts * p.dv);
    sums = sections.add<RowSum>(rows * plan.parts);
    totals = sections.add<char>(plan.tensor_cores ? 0 : window_totals_workspace(p.window));
  }

  static AttentionPlan plan(const WindowAttentionParams& p) { return AttentionPlan::of(p, shared_memory(), kTileRows); }
};

}  // namespace

void launch_window_attention(const WindowAttentionParams& given, Call& call) {
  WindowAttentionParams p = given;
  Window& w = p.window;
  const cudaStream_t stream = stream_of(call);
  AttentionPlan plan = AttentionPlan::of(p);
  Sections sections{call.workspace(bytes_of<WindowAttentionMemory>(p, plan))};
  const auto [parts, sums, totals, logits, passes, turned, widened, biases] = WindowAttentionMemory(p, plan, sections);
  if (w.rope.pairs && !plan.turns) {
    const auto dense = [&](char* memory, int64_t row) {
      return KVView{memory, w.heads * w.n * row, w.n * row, row, row};
    };
    const KVView out = dense(turned, w.k.row_bytes);
    if (w.stored != w.dtype) {
      const KVView values = dense(widened, p.v.row_bytes);
      widen_rows_cuda(w, w.k, out, stream);
      widen_rows_cuda(w, p.v, values, stream);
      w.k = out;
      p.v = values;
      w.stored = w.dtype;
    }
    if (w.key_bias.table) w.key_bias = dense_bias_cuda(w, biases, stream);
    launch_rope_at_slots({w.k, out, w.rope, w.dtype, w.b, w.heads, w.n}, call);
    w.k = out;
    w.rope = {};
    plan = AttentionPlan::of(p);
  }
  if (plan.tensor_cores) {
    attention_parts_cuda(p, plan, parts, sums, logits, stream);
  } else {
    window_totals(w, totals, logits, passes, stream);
    plain_attention_parts_cuda(p, plan, reinterpret_cast<const RowSum*>(totals), parts, sums, stream);
  }
  attention_combine_cuda(p, plan, w.dtype, parts, sums, reinterpret_cast<RowSum*>(totals), stream);
  if (!w.scores) return;
  if (logits)
    window_row_scores(w, logits, totals, stream);
  else
    window_scores_pass(w, totals, passes, stream);
}

int64_t window_outputs_workspace(const WindowAttentionParams& p) {
  return bytes_of<OutputsMemory>(p, OutputsMemory::plan(p));
}

void window_outputs(const WindowAttentionParams& p, float2* totals, void* workspace, cudaStream_t stream) {
  const AttentionPlan plan = OutputsMemory::plan(p);
  Sections sections{workspace};
  const OutputsMemory memory(p, plan, sections);
  RowSum* const of_rows = reinterpret_cast<RowSum*>(totals);
  if (plan.tensor_cores) {
    rounded_parts_cuda(p, plan, memory.parts, memory.sums, stream);
  } else {
    window_totals(p.window, totals, nullptr, memory.totals, stream);
    plain_attention_parts_cuda(p, plan, of_rows, memory.parts, memory.sums, stream);
  }
  attention_combine_cuda(p, plan, DType::f32, memory.parts, memory.sums, of_rows, stream);
}

}  // namespace kvops
