// Gathers the kept rows of K and V on the CPU.
//
// Bytes that must move: each kept row read once and written once. An ordinary store first reads the cache line that it
// overwrites, so outputs larger than the caches are written with streaming stores. Kept rows are scattered, so the
// kernel prefetches the rows ahead itself.
//
// Speed depends on how scattered the kept rows are. If they form one run, a quarter of 65536 rows moves at 83-91 % of
// the best copy of as many bytes; if they are scattered at random, at 54-70 % (bench/results/cpu-v4.json). A bare loop
// over the same rows does no better with any prefetch distance, order or kind: the memory system also fetches bytes
// between the rows that no one requested.
//
// Work is split over (batch, head) and over runs of kept rows. All indices have been checked before.
#include "../ops/gather_kv.h"
#include "rows.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kRun = 256;  // rows per work item

// Copies rows [first, last) of the output.
template <class Copy>
void gather_run(const Strip in, const Strip out, const int64_t* index, int64_t index_stride, int64_t m, int64_t first,
                int64_t last, const Copy copy) {
  const int64_t far = rows_ahead(in.bytes);
  for (int64_t i = first; i < last; ++i) {
    if (i + far < m) {
      const int64_t ahead = index[(i + far) * index_stride];
      if (ahead >= 0) prefetch_row(in.row(ahead), in.bytes);
    }
    const int64_t source = index[i * index_stride];
    if (source >= 0)
      copy(out.row(i), in.row(source), in.bytes);
    else
      memset(out.row(i), 0, in.bytes);
  }
}

}  // namespace

void gather_kv(const GatherKVParams& p, Call& call) {
  const Workers workers = workers_for(call, p.b * p.heads * p.indices.m * (p.k.row_bytes + p.v.row_bytes));
  const int64_t m = p.indices.m, runs = (m + kRun - 1) / kRun, units = p.b * p.heads * runs;
  const int64_t total = p.b * p.heads * m * (p.k.row_bytes + p.v.row_bytes);
  const bool large = total >= kStreamedOutput;
  const bool stream_k = large && streamable(p.k_out), stream_v = large && streamable(p.v_out);
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Share mine = share(units, worker, workers.count);
    for (int64_t unit = mine.first; unit < mine.last; ++unit) {
      const int64_t b = unit / runs / p.heads, h = unit / runs % p.heads, first = unit % runs * kRun;
      const int64_t last = m - first < kRun ? m : first + kRun;
      const int64_t* index = p.indices.data + b * p.indices.stride_b + h * p.indices.stride_h;
      const auto gather = [&](const KVView& in, const KVView& out, bool stream) {
        const Strip from(in, b, h), to(out, b, h);
        if (stream)
          gather_run(from, to, index, p.indices.stride_m, m, first, last, StreamRow{});
        else
          gather_run(from, to, index, p.indices.stride_m, m, first, last, CopyRow{});
      };
      gather(p.k, p.k_out, stream_k);
      gather(p.v, p.v_out, stream_v);
    }
    if (stream_k || stream_v) stream_fence();
  });
}

}  // namespace kvops::KVOPS_ISA
