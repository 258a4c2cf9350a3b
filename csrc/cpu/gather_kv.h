// The kept rows of K and V, on the CPU.
//
// Bytes that must move: each kept row read once and written once, and no more. An ordinary store first reads the line
// that it is about to overwrite; so once the output is larger than the caches it is written with streaming stores.
// Kept rows lie scattered, so the rows ahead are prefetched by hand.
//
// Work is split over (batch, head) and over runs of kept rows. All indices were checked before.
#include "../ops/gather_kv.h"
#include "rows.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kRun = 256;           // rows in a unit of work
constexpr int64_t kStreamed = 4 << 20;  // bytes of output from which streaming stores pay

template <class Copy>
void gather_run(const KVView& in, const KVView& out, const IndexView& indices, int64_t b, int64_t h, int64_t first,
                int64_t last, const Copy& copy) {
  const int64_t* index = indices.data + b * indices.stride_b + h * indices.stride_h;
  const int64_t far = rows_ahead(in.row_bytes);
  for (int64_t i = first; i < last; ++i) {
    if (i + far < indices.m) {
      const int64_t ahead = index[(i + far) * indices.stride_m];
      if (ahead >= 0) prefetch_row(in.row(b, h, ahead), in.row_bytes);
    }
    const int64_t source = index[i * indices.stride_m];
    if (source >= 0)
      copy(out.row(b, h, i), in.row(b, h, source), in.row_bytes);
    else
      zero_row(out.row(b, h, i), in.row_bytes);
  }
}

}  // namespace

void gather_kv(const GatherKVParams& p, const Workers& workers) {
  const int64_t m = p.indices.m, runs = (m + kRun - 1) / kRun, units = p.b * p.heads * runs;
  const int64_t total = p.b * p.heads * m * (p.k.row_bytes + p.v.row_bytes);
  const bool stream_k = total >= kStreamed && streamable(p.k_out), stream_v = total >= kStreamed && streamable(p.v_out);
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Share mine = share(units, worker, workers.count);
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
      const int64_t b = unit / runs / p.heads, h = unit / runs % p.heads, first = unit % runs * kRun;
      const int64_t last = m - first < kRun ? m : first + kRun;
      const auto gather = [&](const KVView& in, const KVView& out, bool stream) {
        if (stream)
          gather_run(in, out, p.indices, b, h, first, last, stream_row);
        else
          gather_run(in, out, p.indices, b, h, first, last, copy_row);
      };
      gather(p.k, p.k_out, stream_k);
      gather(p.v, p.v_out, stream_v);
    }
    if (stream_k || stream_v) stream_fence();
  });
}

}  // namespace kvops::KVOPS_ISA
