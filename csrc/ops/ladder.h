// LaCache's ladder (ladder_compact_, ladder_gather): the source slot of each kept row, and the parameters.
#pragma once
#include "../kv_view.h"

namespace kvops {

constexpr int kMaxPasses = 192;  // per call: a kernel takes the plan by value

// One pass over a layer: `count` consecutive ladders of keep + free slots each, the first starting at slot `cursor`.
struct LadderPass {
  int32_t cursor, count;
};

// The passes of a plan, in the order in which they were decided. In each ladder a layer keeps `keep` consecutive slots,
// starting at its offset in [0, free], and frees the others; everything after moves down. source() is the closed form
// of this, so no index tensor is needed.
struct LadderMoves {
  int32_t n, kept;     // slots before and after
  int32_t first;       // the slots before this one do not move
  int32_t keep, free;  // slots per ladder
  int32_t num_passes;
  LadderPass passes[kMaxPasses];

  // The slot that holds the row for slot p < kept: strictly increasing in p and never below p. `run` is set to the
  // number of slots from p on whose rows come from consecutive slots. Always inlined: an out-of-line copy, compiled for
  // one instruction set, could be linked in for every CPU.
  KVOPS_HOST_DEVICE int32_t source(int32_t p, int32_t offset, int32_t& run) const {
    run = kept - p;
    for (int32_t i = num_passes - 1; i >= 0; --i) {
      const int32_t in = p - passes[i].cursor;
      int32_t left = -in;  // the number of slots that this pass treats alike
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

// RoPE for the keys that move: pair i is rotated by (new slot - old slot) * inv_freq[i].
struct LadderRope {
  const float* inv_freq;  // [pairs], or null: keys move without rotation
  int64_t pairs;          // channels from 2 * pairs on are not rotated
  bool interleaved;       // pair i is channels 2 i, 2 i + 1 (GPT-J), else i, i + pairs (NeoX)
};

struct LadderLayer {
  KVView k, v;          // [b, Hk, n, d], [b, Hk, n, dv]
  KVView k_out, v_out;  // [b, Hk, kept, d], [b, Hk, kept, dv]; in place: k and v themselves
  int32_t offset;       // in [0, free]
};

struct LadderParams {
  const LadderLayer* layers;  // on the host
  int64_t num_layers;         // in this call
  LadderMoves moves;
  LadderRope rope;
  DType dtype;
  int64_t b, heads;
};

}  // namespace kvops
