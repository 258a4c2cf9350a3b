// Moves the kept rows of K and V to the front, in place, on the CPU.
//
// Kept slots ascend, so slot i receives a row from index[i] >= i. Going forward, no destination overtakes a source that
// is still needed, and no extra memory is used. Within a head the rows form one chain, so work is not split over
// tokens. It is split over K, V and heads, and if those are too few, over columns of the rows (whole cache lines). One
// run of rows moves at 108-117 % of the speed of a plain loop that shifts as many bytes in place, randomly scattered
// rows at 73-77 % (bench/results/cpu-v4.json; gather_kv.h explains why). Streaming stores avoid reading a destination
// that has left the cache. The leading slots that do not move (sinks, LagKV's static part) are skipped.
#include "../ops/compact_kv_.h"
#include "rows.h"

namespace kvops::KVOPS_ISA {
namespace {

void compact_strip(const Strip x, const int64_t* index, int64_t index_stride, int64_t m, bool may_stream) {
  const int64_t far = rows_ahead(x.bytes);
  int64_t i = 0;
  while (i < m && index[i * index_stride] == i) ++i;
  RowWalk to(x.rows, i);
  for (; i < m; ++i) {
    if (i + far < m) {
      const int64_t ahead = index[(i + far) * index_stride];
      if (ahead >= 0) prefetch_row(x.row(ahead), x.bytes);
    }
    const int64_t source = index[i * index_stride];
    if (source < 0 && x.rows.pages)
      break;  // slots after the kept ones may have no page
    else if (source < 0)
      memset(to.next(), 0, x.bytes);
    else if (may_stream && (source - i) * x.rows.stride_n >= kStreamedMove)
      StreamRow{}(to.next(), x.row(source), x.bytes);
    else
      CopyRow{}(to.next(), x.row(source), x.bytes);
  }
  if (may_stream) stream_fence();
}

}  // namespace

void compact_kv_(const CompactKVParams& p, Call& call) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < p.num_layers; ++i) {
    const CompactKVLayer& x = p.layers[i];
    bytes += p.b * p.heads * x.indices.m * (x.k.row_bytes + x.v.row_bytes);
  }
  const Workers workers = workers_for(call, bytes);
  const int64_t heads = p.b * p.heads, rows = 2 * heads * p.num_layers;
  const int64_t wanted = rows >= workers.count ? 1 : (workers.count + rows - 1) / rows;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Share mine = share(rows * wanted, worker, workers.count);
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
      const int64_t row = unit / wanted, head = row / 2 % heads, b = head / p.heads, h = head % p.heads;
      const CompactKVLayer& layer = p.layers[row / 2 / heads];
      const KVView& x = row % 2 ? layer.v : layer.k;
      const IndexView& indices = layer.indices;
      const Strip strip = column_strip(x, b, h, unit % wanted, wanted);
      if (strip.bytes == 0) continue;
      compact_strip(strip, indices.data + b * indices.stride_b + h * indices.stride_h, indices.stride_m, indices.m,
                    streamable(x) && strip.bytes % VB == 0);
    }
  });
}

}  // namespace kvops::KVOPS_ISA
