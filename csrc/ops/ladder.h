// LaCache's ladder (ladder_compact_, ladder_gather): where a slot's row comes from, parameters, checks.
#pragma once
#include "../kv_view.h"

namespace kvops {

constexpr int kMaxPasses = 192;  // of one call: a kernel gets them by value

// One pass over a layer: `count` ladders of keep + free consecutive slots, the first at slot `cursor`.
struct LadderPass {
  int32_t cursor, count;
};

// A plan's passes in the order in which they were decided. Within a ladder a layer keeps `keep` consecutive slots, from
// its offset in [0, free] on, and frees the others; all else moves down. The closed form of where a row comes from,
// so no index tensor is needed.
struct LadderMoves {
  int32_t n, kept;     // slots before and after
  int32_t first;       // the slots before this one stay where they are
  int32_t keep, free;  // slots of a ladder
  int32_t num_passes;
  LadderPass passes[kMaxPasses];

  // The slot that the row of slot p < kept comes from: strictly increasing in p, and never below p. `run`: so many
  // slots from p on come from consecutive ones. Always inlined: a copy of its own, compiled for one instruction set,
  // could be linked in for every CPU.
  __attribute__((always_inline)) KVOPS_HOST_DEVICE int32_t source(int32_t p, int32_t offset, int32_t& run) const {
    run = kept - p;
    for (int32_t i = num_passes - 1; i >= 0; --i) {
      const int32_t in = p - passes[i].cursor;
      int32_t left = -in;  // of the slots that this pass treats alike
      if (in >= keep * passes[i].count) {
        p += free * passes[i].count;
        continue;
      }
      if (in >= 0) {
        const int32_t ladder = in / keep;
        left = (ladder + 1) * keep - in;
        p += offset + free * ladder;
      }
      run = left < run ? left : run;
    }
    return p;
  }
};

// Rotary position embedding of the keys that move: by (new slot - old slot) * inv_freq[i], pair i.
struct LadderRope {
  const float* inv_freq;  // [pairs] or null: keys are only moved
  int64_t pairs;          // channels 2 * pairs and above stay
  bool interleaved;       // pair i is channels 2 i, 2 i + 1 (GPT-J), else i, i + pairs (NeoX)
};

// Floats of scratch that a CPU worker needs: cosines and sines, each rounded up to a 64-byte register.
inline int64_t ladder_scratch(const LadderRope& rope) {
  return rope.inv_freq ? 2 * ((rope.pairs + 15) / 16 * 16) : 0;
}

struct LadderLayer {
  KVView k, v;          // [b, Hk, n, d], [b, Hk, n, dv]
  KVView k_out, v_out;  // [b, Hk, kept, d], [b, Hk, kept, dv]; k and v themselves in place
  int32_t offset;       // in [0, free]
};

struct LadderParams {
  const LadderLayer* layers;  // on the host
  int64_t num_layers;         // of this call
  LadderMoves moves;
  LadderRope rope;
  DType dtype;
  int64_t b, heads;
};

#ifdef KVOPS_CHECKS
// What check_ladder makes: the layers, and the parameters, which point at them.
struct LadderCall {
  std::vector<LadderLayer> layers;
  LadderParams params;
};

// `plan`: n, num_layers, span, overlap, 1 for the official pattern, then cursor and count of each pass.
inline LadderMoves check_ladder_plan(const char* op, const std::vector<int64_t>& plan) {
  KVOPS_CHECK(plan.size() >= 5 && plan.size() % 2 == 1, op,
              ": plan must be a kvops.LadderPlan, or its `encoded`: 5 integers and 2 for each pass, got ", plan.size());
  const int64_t n = plan[0], layers = plan[1], span = plan[2], overlap = plan[3], step = span - overlap;
  KVOPS_CHECK(0 <= n && n <= std::numeric_limits<int32_t>::max(), op, ": plan's n must fit int32, got ", n);
  KVOPS_CHECK(1 <= span && span <= layers && 0 <= overlap && overlap < span && layers <= 1 << 20, op,
              ": plan needs 0 <= overlap < span <= num_layers, got overlap ", overlap, ", span ", span, ", num_layers ",
              layers);
  KVOPS_CHECK(plan[4] == 0 || plan[4] == 1, op, ": plan's pattern must be 0 (paper) or 1 (official), got ", plan[4]);
  const int64_t length = 1 + (layers - span + step - 1) / step, keep = std::min((span + step - 1) / step, length);
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
                ": pass ", i, " of plan must lie in the ", left, " slots that are left, got ", count, " ladders of ",
                length, " slots from slot ", cursor, " on");
    moves.passes[i] = {static_cast<int32_t>(cursor), static_cast<int32_t>(count)};
    moves.first = std::min(moves.first, static_cast<int32_t>(cursor));
    left -= count * moves.free;
  }
  moves.kept = static_cast<int32_t>(left);
  moves.first = std::min(moves.first, moves.kept);
  return moves;
}

inline int32_t ladder_offset(const std::vector<int64_t>& plan, const LadderMoves& moves, int64_t layer) {
  if (plan[4]) return static_cast<int32_t>(layer % (moves.free + 1));
  const int64_t offset = layer / (plan[2] - plan[3]) - (moves.keep - 1);
  return static_cast<int32_t>(std::clamp<int64_t>(offset, 0, moves.free));
}

inline LadderRope check_ladder_rope(const char* op, const OptionalTensor& inv_freq, bool interleaved, const Tensor& k) {
  if (!inv_freq) return {nullptr, 0, interleaved};
  check_same_device(op, "inv_freq", *inv_freq, k);
  check_scalar_type(op, "inv_freq", *inv_freq, ScalarType::Float);
  KVOPS_CHECK(
      inv_freq->dim() == 1 && inv_freq->is_contiguous() && 1 <= inv_freq->size(0) && 2 * inv_freq->size(0) <= k.size(3),
      op, ": inv_freq must be a contiguous fp32 [pairs] with 2 * pairs at most the head_dim ", k.size(3), ", got ",
      shape(*inv_freq));
  return {static_cast<const float*>(inv_freq->const_data_ptr()), inv_freq->size(0), interleaved};
}

// `tensors` by name, numbered where there are several.
inline void add_named(std::vector<Named>& to, const char* name, const std::vector<Tensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::string numbered = name;
    if (tensors.size() > 1) numbered.append("[").append(std::to_string(i)).append("]");
    to.push_back({numbered, tensors[i]});
  }
}

// All but the targets' overlaps. Empty outputs: in place.
inline LadderCall check_ladder(const char* op, const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                               const std::vector<int64_t>& plan, const std::vector<int64_t>& layer,
                               const OptionalTensor& inv_freq, bool interleaved, bool in_place) {
  KVOPS_CHECK(!k.empty(), op, ": k must hold at least one layer, got none");
  KVOPS_CHECK(k.size() == v.size() && k.size() == layer.size(), op, ": k, v and layer must be equally many, got ",
              k.size(), ", ", v.size(), " and ", layer.size());
  LadderCall call{};
  LadderParams& p = call.params;
  for (size_t i = 0; i < k.size(); ++i) {
    check_same_device(op, "k", k[i], k[0]);
    const KVPair kv = check_kv_pair(op, k[i], v[i], in_place);
    if (i == 0) {
      p.moves = check_ladder_plan(op, plan);
      p.dtype = kv.dtype;
      p.b = kv.b;
      p.heads = kv.heads;
      KVOPS_CHECK(kv.n == p.moves.n, op, ": k must have the plan's ", p.moves.n, " slots, got ", shape(k[0]));
    }
    KVOPS_CHECK(kv.dtype == p.dtype, op, ": all layers must have one dtype, expected ",
                torch::headeronly::toString(k[0].scalar_type()), ", got ",
                torch::headeronly::toString(k[i].scalar_type()), " in layer ", layer[i]);
    for (int dim = 0; dim < 4; ++dim)
      KVOPS_CHECK(k[i].size(dim) == k[0].size(dim) && v[i].size(dim) == v[0].size(dim), op,
                  ": all layers must have one shape, expected k ", shape(k[0]), " and v ", shape(v[0]), ", got ",
                  shape(k[i]), " and ", shape(v[i]), " in layer ", layer[i]);
    KVOPS_CHECK(0 <= layer[i] && layer[i] < plan[1], op, ": layer must lie in [0, ", plan[1], "), got ", layer[i]);
    call.layers.push_back({kv.k, kv.v, kv.k, kv.v, ladder_offset(plan, p.moves, layer[i])});
  }
  p.rope = check_ladder_rope(op, inv_freq, interleaved, k[0]);
  p.layers = call.layers.data();
  p.num_layers = static_cast<int64_t>(call.layers.size());
  return call;
}
#endif

}  // namespace kvops
