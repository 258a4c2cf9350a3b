// The checks of ladder_gather and ladder_compact_.
#pragma once
#include "ladder.h"
#include "layers.h"

namespace kvops {

// The result of check_ladder(): the layers, and the parameters that point to them.
struct CheckedLadder {
  std::vector<LadderLayer> layers;
  LadderParams params;
};

enum LadderPattern : int64_t { kPaper, kOfficial, kShort };  // as kvops.ops.ladder.PATTERNS

// `plan`: n, num_layers, span, overlap, pattern, then the cursor and count of each pass.
inline LadderMoves check_ladder_plan(const char* op, const Integers& plan) {
  KVOPS_CHECK(plan.size() >= 5 && plan.size() % 2 == 1, op,
              ": plan must be a kvops.LadderPlan, or its `encoded`: 5 integers and 2 for each pass, got ", plan.size(),
              " integers");
  const int64_t n = plan[0], layers = plan[1], span = plan[2], overlap = plan[3], step = span - overlap;
  KVOPS_CHECK(0 <= n && n <= std::numeric_limits<int32_t>::max(), op, ": plan's n must fit int32, got ", n);
  KVOPS_CHECK(1 <= span && span <= layers && 0 <= overlap && overlap < span && layers <= 1 << 20, op,
              ": plan needs 0 <= overlap < span <= num_layers, got overlap ", overlap, ", span ", span, ", num_layers ",
              layers);
  KVOPS_CHECK(kPaper <= plan[4] && plan[4] <= kShort, op,
              ": plan's pattern must be 0 (paper), 1 (official) or 2 (short), got ", plan[4]);
  int64_t length = 1 + (layers - span + step - 1) / step, keep = (span + step - 1) / step;
  if (plan[4] == kPaper) length = std::min(length, keep * (layers / span));
  keep = std::min(keep, length);
  const int64_t passes = static_cast<int64_t>(plan.size() - 5) / 2;
  KVOPS_CHECK(passes <= kMaxPasses, op, ": plan may have at most ", kMaxPasses, " passes, got ", passes,
              "; LadderPlan.parts() splits it");
  LadderMoves moves{.n = static_cast<int32_t>(n),
                    .kept = 0,
                    .first = static_cast<int32_t>(n),
                    .keep = static_cast<int32_t>(keep),
                    .free = static_cast<int32_t>(length - keep),
                    .num_passes = static_cast<int32_t>(passes),
                    .passes = {}};
  int64_t left = n;
  for (int64_t i = 0; i < passes; ++i) {
    const int64_t cursor = plan[5 + 2 * i], count = plan[6 + 2 * i];
    KVOPS_CHECK(0 <= cursor && cursor <= left && 0 < count && count <= left && cursor + count * length <= left, op,
                ": pass ", i, " of plan must fit in the ", left, " remaining slots, got ", count, " ladders of ",
                length, " slots starting at slot ", cursor);
    moves.passes[i] = {static_cast<int32_t>(cursor), static_cast<int32_t>(count)};
    moves.first = std::min(moves.first, static_cast<int32_t>(cursor));
    left -= count * moves.free;
  }
  moves.kept = static_cast<int32_t>(left);
  moves.first = std::min(moves.first, moves.kept);
  return moves;
}

inline int32_t ladder_offset(const Integers& plan, const LadderMoves& moves, int64_t layer) {
  if (plan[4] == kOfficial) return static_cast<int32_t>(layer % (moves.free + 1));
  int64_t offset = layer / (plan[2] - plan[3]) - (moves.keep - 1);
  if (plan[4] == kPaper) {  // early enough that the slots that follow have `span` layers each
    offset = std::max(offset, moves.free - moves.keep * ((plan[1] - 1 - layer) / plan[2]));
  }
  return static_cast<int32_t>(std::clamp<int64_t>(offset, 0, moves.free));
}

inline LadderRope check_ladder_rope(const char* op, const OptionalTensor& inv_freq, bool interleaved, const Tensor& k) {
  if (!inv_freq) return {nullptr, 0, interleaved};
  check_same_device(op, "inv_freq", *inv_freq, k);
  check_scalar_type(op, "inv_freq", *inv_freq, ScalarType::Float);
  KVOPS_CHECK(
      inv_freq->dim() == 1 && inv_freq->is_contiguous() && 1 <= inv_freq->size(0) && 2 * inv_freq->size(0) <= k.size(3),
      op, ": inv_freq must be a contiguous float32 [pairs] with 2 * pairs at most the head_dim ", k.size(3), ", got ",
      shape(*inv_freq));
  return {static_cast<const float*>(inv_freq->const_data_ptr()), inv_freq->size(0), interleaved};
}

// All checks but those of the targets. The outputs point to k and v: the in-place form.
inline CheckedLadder check_ladder(const char* op, const Tensors& k, const Tensors& v, const Integers& plan,
                                  const Integers& layer, const OptionalTensor& inv_freq, bool interleaved,
                                  bool in_place) {
  const std::vector<KVPair> layers = check_layers(op, k, v, std::nullopt, check_dtype, in_place);
  KVOPS_CHECK(k.size() == layer.size(), op, ": k and layer must have one entry per layer, got ", k.size(), " and ",
              layer.size());
  CheckedLadder ladder{};
  LadderParams& p = ladder.params;
  p.moves = check_ladder_plan(op, plan);
  p.dtype = check_dtype(op, "k", k[0]);
  p.b = layers[0].k.b;
  p.heads = layers[0].k.heads;
  KVOPS_CHECK(layers[0].k.n == p.moves.n, op, ": k must have the plan's ", p.moves.n, " slots, got ", shape(k[0]));
  for (size_t i = 0; i < layers.size(); ++i) {
    const KVView &keys = layers[i].k.view, &values = layers[i].v.view;
    KVOPS_CHECK(0 <= layer[i] && layer[i] < plan[1], op, ": layer must lie in [0, ", plan[1], "), got ", layer[i]);
    ladder.layers.push_back({keys, values, keys, values, ladder_offset(plan, p.moves, layer[i])});
  }
  p.rope = check_ladder_rope(op, inv_freq, interleaved, k[0]);
  p.layers = ladder.layers.data();
  p.num_layers = static_cast<int64_t>(ladder.layers.size());
  return ladder;
}

}  // namespace kvops
