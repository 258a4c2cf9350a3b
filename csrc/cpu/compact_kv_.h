// The kept rows of K and V moved to the front, in place, on the CPU.
//
// Kept slots ascend, so slot i receives a row from index[i] >= i: going forward, a destination never overtakes a source
// that is still needed, and no extra memory is used. Within a head the rows are one chain, so they are not split over
// threads by token; K, V, the heads, and if those are too few, columns of the rows (whole cache lines) are.
// The leading slots that stay where they are (sinks, LagKV's static part) are skipped.
#include "../ops/compact_kv_.h"
#include "rows.h"

namespace kvops::KVOPS_ISA {
namespace {

// Destinations this far (bytes) behind their source have left the cache and are written by streaming stores.
constexpr int64_t kStreamed = 4 << 20;

void compact_columns(const KVView& x, const IndexView& indices, int64_t b, int64_t h, int64_t column, int64_t bytes) {
  const int64_t* index = indices.data + b * indices.stride_b + h * indices.stride_h;
  const int64_t far = rows_ahead(bytes);
  const bool may_stream = streamable(x) && column % VB == 0 && bytes % VB == 0;
  int64_t i = 0;
  while (i < indices.m && index[i * indices.stride_m] == i) ++i;
  for (; i < indices.m; ++i) {
    if (i + far < indices.m) {
      const int64_t ahead = index[(i + far) * indices.stride_m];
      if (ahead >= 0) prefetch_row(x.row(b, h, ahead) + column, bytes);
    }
    const int64_t source = index[i * indices.stride_m];
    char* const to = x.row(b, h, i) + column;
    if (source < 0)
      zero_row(to, bytes);
    else if (may_stream && (source - i) * x.stride_n >= kStreamed)
      stream_row(to, x.row(b, h, source) + column, bytes);
    else
      copy_row(to, x.row(b, h, source) + column, bytes);
  }
  if (may_stream) stream_fence();
}

}  // namespace

void compact_kv_(const CompactKVParams& p, const Workers& workers) {
  const int64_t rows = 2 * p.b * p.heads;
  const int64_t wanted = rows >= workers.count ? 1 : (workers.count + rows - 1) / rows;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Share mine = share(rows * wanted, worker, workers.count);
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
      const int64_t row = unit / wanted, head = row / 2;
      const KVView& x = row % 2 ? p.v : p.k;
      const Share lines = share((x.row_bytes + 63) / 64, unit % wanted, wanted);
      const int64_t end = lines.last * 64 < x.row_bytes ? lines.last * 64 : x.row_bytes;
      if (lines.first * 64 < end)
        compact_columns(x, p.indices, head / p.heads, head % p.heads, lines.first * 64, end - lines.first * 64);
    }
  });
}

}  // namespace kvops::KVOPS_ISA
