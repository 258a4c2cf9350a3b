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
  KVOPS_HOST_DEVICE int32_t source(int32_t p, int32_t offset, int32_t& run) const {
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

}  // namespace kvops
