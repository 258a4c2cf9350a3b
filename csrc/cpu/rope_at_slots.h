// RoPE for keys at their slots on the CPU (rope.h has the formula).
//
// Bytes that must move: K read once and written once, and the tables once. A slot's fp32 cosines and sines take as many
// bytes as two heads' 16-bit keys, and all heads need them. Work is therefore split over (batch, runs of slots), and a
// run's part of the tables stays in the cache while the kernel goes through the heads. The hardware prefetcher restarts
// at every head, so runs are long and the kernel prefetches rows ahead itself: 45 % of the copy bandwidth (bf16, 8
// heads of 65536 rows; fp32 59 %: bench/results/cpu-ladder.json). Large outputs in other memory are written with
// streaming stores.
#include "../dispatch.h"
#include "../ops/rope_at_slots.h"
#include "rope.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kRun = 256;  // slots per work item

template <class T, class Put>
void rotate_run(const RopeAtSlotsParams& p, int64_t b, int64_t first, int64_t last, const Put put) {
  for (int64_t h = 0; h < p.heads; ++h) {
    const Strip in(p.k, b, h), out(p.out, b, h);
    const int64_t far = rows_ahead(in.bytes);
    for (int64_t i = first; i < last; ++i) {
      if (i + far < p.n) prefetch_row(in.row(i + far), in.bytes);
      rotate_row<T>(out.row(i), in.row(i), in.bytes, p.rope.cos.row(b, i), p.rope.sin.row(b, i), p.rope.pairs,
                    p.rope.interleaved, put);
    }
  }
}

}  // namespace

void rope_at_slots(const RopeAtSlotsParams& p, Call& call) {
  const int64_t runs = (p.n + kRun - 1) / kRun, bytes = p.b * p.heads * p.n * p.k.row_bytes;
  const Workers workers = workers_for(call, bytes);
  with_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool stream = bytes >= kStreamedOutput && p.out.data != p.k.data && streamable_turned<T>(p.out, p.rope.pairs);
    parallel_for(workers, workers.count, [&](int64_t worker) {
      const Share mine = share(p.b * runs, worker, workers.count);
      for (int64_t unit = mine.first; unit < mine.last; ++unit) {
        const int64_t b = unit / runs, first = unit % runs * kRun, last = p.n - first < kRun ? p.n : first + kRun;
        if (stream)
          rotate_run<T>(p, b, first, last, StreamRegister{});
        else
          rotate_run<T>(p, b, first, last, PutRegister{});
      }
      stream_fence();
    });
  });
}

}  // namespace kvops::KVOPS_ISA
