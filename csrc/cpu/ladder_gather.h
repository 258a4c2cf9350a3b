// Gathers the slots that LaCache's ladder keeps, from K and V to other memory, on the CPU.
//
// Bytes that must move: each kept row read once and written once. Work is split over (layer, batch, head) and over runs
// of slots. Outputs larger than the caches are written with streaming stores, as in gather_kv.h.
#include "../ops/ladder_gather.h"
#include "ladder.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kRun = 256;  // slots per work item

}  // namespace

void ladder_gather(const LadderParams& p, Call& call) {
  const int64_t row_bytes = p.layers[0].k.row_bytes + p.layers[0].v.row_bytes;
  const Workers workers =
      workers_for(call, p.num_layers * p.b * p.heads * p.moves.kept * row_bytes, ladder_scratch(p.rope));
  const int64_t kept = p.moves.kept, runs = (kept + kRun - 1) / kRun, heads = p.b * p.heads;
  const int64_t stream_from = p.num_layers * heads * kept * row_bytes >= kStreamedOutput ? 0 : kNeverStream;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    float* const tables = workers.workspace + worker * ladder_scratch(p.rope);
    const Share mine = share(p.num_layers * heads * runs, worker, workers.count);
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
      const int64_t b = unit / runs % heads / p.heads, h = unit / runs % p.heads, first = unit % runs * kRun;
      const LadderLayer& layer = p.layers[unit / runs / heads];
      const Share slots{first, kept - first < kRun ? kept : first + kRun};
      const auto gather = [&](const KVView& in, const KVView& out, bool is_key) {
        move_strip(p, layer.offset, out, is_key, {in, b, h}, {out, b, h}, slots, stream_from, tables);
      };
      gather(layer.k, layer.k_out, true);
      gather(layer.v, layer.v_out, false);
    }
    stream_fence();
  });
}

}  // namespace kvops::KVOPS_ISA
