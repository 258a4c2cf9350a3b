// How window_scores and window_attention cut their work, and the scratch memory that it takes. Sizes are those of the
// widest level.
#pragma once
#include "../ops/window.h"

namespace kvops {
namespace {

constexpr int64_t kMaxLanes = 16;   // floats in a vector
constexpr int64_t kMaxVectors = 4;  // vectors of rows that a register block has
constexpr int64_t kMostSplits = 32;
constexpr int64_t kBlock = 48;  // keys that go through all steps while they are in the cache

constexpr int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

constexpr int64_t kTurnedRun = 16 * kBlock;  // keys whose cosines and sines stay in the cache: 384 KiB for 64 pairs

constexpr int64_t kDecodeRows = 8;  // a decode step of so many query heads in a group goes by window_decode.h
inline bool is_decode(const Window& p) {
  return p.w == 1 && p.group <= kDecodeRows;
}

// Keys in a split: the unit of the work that threads share and of the sums that are combined in order. A function of n
// alone, so that results depend neither on threads nor on the batch.
constexpr int64_t split_keys(int64_t n) {
  constexpr int64_t kLeast = 64 * kBlock;
  return round_up(n > kLeast * kMostSplits ? (n + kMostSplits - 1) / kMostSplits : kLeast, kBlock);
}

// The rows of a KV head, group * w of them, lie in the lanes of vectors. What is summed (or maximized) together is a
// segment and starts a new vector: all rows if the order of the two reductions does not matter, else a query head's.
struct Segments {
  int64_t count, rows;  // of each

  explicit Segments(const Window& p) {
    const bool row_max = p.reduce == Reduce::max, group_max = p.group_reduce == Reduce::max;
    const bool one = is_decode(p) || (p.group_reduce != Reduce::none && (p.w == 1 || row_max == group_max));
    count = one ? 1 : p.group;
    rows = one ? p.group * p.w : p.w;
  }
  int64_t vectors(int64_t lanes) const { return (rows + lanes - 1) / lanes; }    // of each
  int64_t lanes(int64_t lanes) const { return count * vectors(lanes) * lanes; }  // of all
};

// Floats that an array takes; every one starts on a cache line.
struct WindowScratch {
  int64_t splits, items;                              // items: splits of all heads
  int64_t lanes;                                      // padded rows of a head
  int64_t queries, keys, values, tile, partial, row;  // of a worker
  int64_t turned;                                     // of a worker: a block's keys, rotated
  int64_t wide_keys, wide_values;                     // of a worker: a block's fp8 rows as bf16
  int64_t worker;                                     // all of them
  int64_t stats;                                      // of an item: running maximum and sum
  int64_t out;                                        // of an item: sums of weighted V rows
  int64_t logits;                                     // of an item: kept for the scores of one row

  // dv: 0 without V.
  WindowScratch(const Window& p, int64_t dv) {
    const Segments segments(p);
    const int64_t words = round_up(p.d, 2 * kMaxLanes);
    splits = (p.n + split_keys(p.n) - 1) / split_keys(p.n);
    items = p.b * p.heads * splits;
    lanes = segments.lanes(kMaxLanes);
    queries = words * lanes;
    keys = p.dtype == DType::f32 ? 0 : kBlock * words;
    values = p.dtype == DType::f32 ? 0 : kBlock * round_up(dv, 2 * kMaxLanes);
    tile = kBlock * kMaxVectors * kMaxLanes;
    partial = kBlock * kMaxLanes;
    row = lanes;
    turned = p.rope.pairs ? kBlock * round_up(p.k.row_bytes / 4, kMaxLanes) : 0;
    const bool fp8 = p.stored != p.dtype;
    wide_keys = fp8 ? kBlock * round_up(p.d / 2, kMaxLanes) : 0;
    wide_values = fp8 ? kBlock * round_up(dv / 2, kMaxLanes) : 0;
    worker = queries + keys + values + tile + 2 * partial + 2 * kBlock + 4 * row + turned + wide_keys + wide_values;
    stats = 2 * lanes;
    out = lanes * round_up(dv, 2 * kMaxLanes);
    logits = p.w == 1 && p.scores ? round_up(segments.count * segment_logits(p), kMaxLanes) : 0;
  }

  // A segment's logits of an item, and room behind for the last vector.
  static int64_t segment_logits(const Window& p) { return split_keys(p.n) * logit_pitch(Segments(p)) + kMaxLanes; }
  // From a key's logits to the next key's.
  static int64_t logit_pitch(const Segments& segments) {
    const int64_t rows = segments.rows;
    return rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 8 ? 8 : round_up(rows, kMaxLanes);
  }
};

}  // namespace
}  // namespace kvops
