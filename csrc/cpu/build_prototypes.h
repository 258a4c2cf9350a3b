// Mean keys of chunks and of buckets on the CPU.
//
// Bytes that must move: K once. Each prototype is one work item. Its rows (consecutive tokens except the anchors, or
// the anchors of a bucket) are gathered VL at a time and added in fp32; these partial sums are added in fp64. A
// non-finite sum is recomputed row by row without the non-finite rows.
#include "../dispatch.h"
#include "../ops/build_prototypes.h"
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int64_t kAhead = 2 * VL;  // rows

template <class T>
struct Mean {
  const RowShape shape;
  const int64_t d, ahead;  // ahead: bytes to the prefetched row; with pages build_heads prefetches instead
  double* const total;     // both in register order
  float* const tile;
  const T* row[VL] = {};
  int waiting = 0;
  int64_t count = 0;

  Mean(const BuildPrototypesParams& p, float* memory)
      : shape(row_shape<T>(p.k.row_bytes)),
        d(p.d),
        ahead(p.k.table ? 0 : kAhead * p.k.stride_n),
        total(reinterpret_cast<double*>(memory)),
        tile(memory + 2 * width()) {}

  int64_t width() const { return shape.registers() * kStep<T>; }

  void add(const char* data) {
    row[waiting++] = reinterpret_cast<const T*>(data);
    if (waiting == VL) add_tile();
  }

  void add_tile() {
    F poison{};
    for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
      F sums[kVecs<T>] = {};
      for (int r = 0; r < waiting; ++r) {
        F x[kVecs<T>];
        prefetch(row[r], c, ahead);
        load_row(row[r], x);
        for (int j = 0; j < kVecs<T>; ++j) sums[j] += x[j];
      }
      for (int j = 0; j < kVecs<T>; ++j) {
        poison += sums[j] * 0.0f;
        store(tile + (c * kVecs<T> + j) * VL, sums[j]);
      }
    });
    if (__builtin_expect(!any_nan(poison), 1)) {
      for (int64_t c = 0; c < width(); ++c) total[c] += tile[c];
      count += waiting;
    } else {
      for (int r = 0; r < waiting; ++r) add_carefully(row[r]);
    }
    waiting = 0;
  }

  void add_carefully(const T* x) {
    for (int64_t c = 0; c < d; ++c)
      if (!is_finite(to_float(x[c]))) return;
    for (int64_t c = 0; c < d; ++c) total[channel_slot<T>(c)] += to_float(x[c]);
    ++count;
  }

  // Writes the mean and resets the sums.
  void finish(float* mean, int32_t* number) {
    add_tile();
    for (int64_t c = 0; c < d; ++c)
      mean[c] = count ? static_cast<float>(total[channel_slot<T>(c)] / static_cast<double>(count)) : 0.0f;
    *number = static_cast<int32_t>(count);
    start();
  }
  void start() {
    for (int64_t c = 0; c < width(); ++c) total[c] = 0;
    count = 0;
  }
};

// A head's anchors, ascending, with -1 last.
struct Anchors {
  const int64_t* data;
  int64_t stride, count;
  int64_t slot(int64_t i) const { return data[i * stride]; }

  // The first anchor that is at least `least`.
  int64_t lower_bound(int64_t least) const {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const bool below = slot(middle) >= 0 && slot(middle) < least;
      (below ? low : high) = below ? middle + 1 : middle;
    }
    return low;
  }
};

// Floats of scratch per worker: an fp64 and an fp32 sum, padded to whole registers.
inline int64_t scratch_of(const BuildPrototypesParams& p) {
  return 3 * ((p.d + 31) / 32 * 32);
}

template <class T>
void build_heads(const BuildPrototypesParams& p, const Workers& workers) {
  parallel_for(workers, workers.count, [&](int64_t worker) {
    Mean<T> mean(p, workers.workspace + worker * scratch_of(p));
    mean.start();
    const Share items = share(p.b * p.heads * p.count(), worker, workers.count);
    for (int64_t item = items.first; item < items.last; ++item) {
      const int64_t index = item / p.count(), prototype = item % p.count(), b = index / p.heads, h = index % p.heads;
      const Anchors anchors{p.sats.data + b * p.sats.stride_b + h * p.sats.stride_h, p.sats.stride_m, p.sats.m};
      const HeadRows rows = p.k.head(b, h);
      const int64_t first = p.slots.first(b), valid = p.slots.count(b);
      if (prototype < p.chunks(valid)) {
        const int64_t end = first + p.chunk_begin(valid, prototype + 1);
        int64_t i = first + p.chunk_begin(valid, prototype), next = anchors.lower_bound(i);
        RowWalk walk(rows, i), ahead(rows, i + kAhead);
        for (; i < end; ++i) {
          if (rows.pages && i + kAhead < end) prefetch_row(ahead.next(), p.k.row_bytes);
          const char* const row = walk.next();
          if (next < anchors.count && anchors.slot(next) == i) {
            ++next;
          } else {
            mean.add(row);
          }
        }
      } else if (prototype >= p.num_chunks) {
        const int32_t* const buckets = p.buckets + index * p.sats.m;
        for (int64_t i = 0; i < anchors.count; ++i) {
          const int64_t slot = anchors.slot(i);
          if (buckets[i] == prototype - p.num_chunks && slot >= first && slot < first + valid) mean.add(rows.row(slot));
        }
      }
      mean.finish(p.prototypes + item * p.d, p.counts + item);
    }
  });
}

}  // namespace

void build_prototypes(const BuildPrototypesParams& p, Call& call) {
  const Workers workers = workers_for(call, p.b * p.heads * p.n * p.k.row_bytes, scratch_of(p));
  with_read_dtype(p.dtype, [&](auto type) { build_heads<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
