// LaCache compaction in place, on the CPU: moves the slots that the ladder keeps to the front, all layers at once.
//
// Sources ascend and are never below their slot. Going forward, no source that is still needed is overwritten, and no
// extra memory is used. The rows of one (layer, batch, head) of K or V form one chain. The chains of all layers are
// split over threads, and if those are too few, so are columns of their rows (not for rotated keys, because the two
// channels of a pair lie apart). Bytes: 2 x the rows that move; rows before the first ladder, and rows that a ladder
// leaves in place, are not touched. Between two decode steps rows move by a few slots only, so the destinations are
// still in the cache. 32 layers of 2048 slots (8 heads, bf16) move at 94 % of the speed of a plain loop that shifts as
// many bytes in place, with RoPE at 84 %, in fp32 at 103 and 98 % (bench/results/cpu-ladder.json).
#include "../ops/ladder_compact_.h"
#include "ladder.h"

namespace kvops::KVOPS_ISA {

void ladder_compact_(const LadderParams& p, Call& call) {
  const int64_t row_bytes = p.layers[0].k.row_bytes + p.layers[0].v.row_bytes;
  const Workers workers = workers_for(call, p.num_layers * p.b * p.heads * (p.moves.kept - p.moves.first) * row_bytes,
                                      ladder_scratch(p.rope));
  const int64_t heads = p.b * p.heads, chains = 2 * p.num_layers * heads;
  const int64_t wanted = chains >= workers.count ? 1 : (workers.count + chains - 1) / chains;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    float* const tables = workers.workspace + worker * ladder_scratch(p.rope);
    const Share mine = share(chains * wanted, worker, workers.count);
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
      const int64_t chain = unit / wanted, head = chain / 2 % heads, part = unit % wanted;
      const bool is_key = chain % 2 == 0, whole = is_key && p.rope.inv_freq;
      if (whole && part > 0) continue;
      const LadderLayer& layer = p.layers[chain / 2 / heads];
      const KVView& x = is_key ? layer.k : layer.v;
      const Strip strip = column_strip(x, head / p.heads, head % p.heads, part, whole ? 1 : wanted);
      if (strip.bytes == 0) continue;
      const int64_t stream_from = kStreamedMove / (strip.rows.stride_n > 0 ? strip.rows.stride_n : 1) + 1;
      move_strip(p, layer.offset, x, is_key, strip, strip, {p.moves.first, p.moves.kept}, stream_from, tables);
    }
    stream_fence();
  });
}

}  // namespace kvops::KVOPS_ISA
