// How window_scores and window_attention split their work, and the scratch memory this needs. Sizes fit the widest
// level.
#pragma once
#include "../ops/window.h"

namespace kvops {
namespace {

constexpr int64_t kMaxLanes = 16;   // floats in a vector
constexpr int64_t kMaxVectors = 4;  // vectors of rows in a register block
constexpr int64_t kMostSplits = 32;
constexpr int64_t kBlock = 48;  // keys that go through all steps while they are in the cache

constexpr int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

constexpr int64_t kTurnedRun = 16 * kBlock;  // keys whose cosines and sines stay in the cache: 384 KiB for 64 pairs

constexpr int64_t kDecodeRows = 8;  // attention of one row with up to this many query heads: window_decode.h
inline bool is_decode(const Window& p) {
  return p.w == 1 && p.group <= kDecodeRows;
}

// Keys per split. Splits are the unit of work for threads, and of the sums that are combined in order. The size depends
// on n alone, so results depend neither on the number of threads nor on the batch.
constexpr int64_t split_keys(int64_t n) {
  constexpr int64_t kLeast = 64 * kBlock;
  return round_up(n > kLeast * kMostSplits ? (n + kMostSplits - 1) / kMostSplits : kLeast, kBlock);
}

// The group * w rows of a KV head are packed into the lanes of vectors. Rows that are summed (or maximized) together
// form a segment, which starts a new vector: all rows if the order of the two reductions does not matter, otherwise the
// rows of one query head. window_decode.h has one segment in any case.
struct Segments {
  int64_t count, rows;  // rows: per segment

  Segments(const Window& p, bool decode) {
    const bool row_max = p.reduce == Reduce::max, group_max = p.group_reduce == Reduce::max;
    const bool one = decode || (p.group_reduce != Reduce::none && (p.w == 1 || row_max == group_max));
    count = one ? 1 : p.group;
    rows = one ? p.group * p.w : p.w;
  }
  int64_t vectors(int64_t lanes) const { return (rows + lanes - 1) / lanes; }    // per segment
  int64_t lanes(int64_t lanes) const { return count * vectors(lanes) * lanes; }  // of all segments
};

// Sizes of the scratch arrays, in floats. Each array starts on a cache line.
struct WindowScratch {
  int64_t splits, items;                              // items: the splits of all heads
  int64_t lanes;                                      // padded rows of a head
  int64_t queries, keys, values, tile, partial, row;  // per worker
  int64_t turned;                                     // per worker: a block's keys, rotated
  int64_t wide_keys, wide_values;                     // per worker: a block's rows as bf16, or copied for tiles
  int64_t rearranged;                                 // per worker: for tiles, a block's values or weights, and sums
  int64_t worker;                                     // per worker: all of these
  int64_t stats;                                      // per item: running maximum and sum
  int64_t out;                                        // per item: sums of weighted V rows
  int64_t logits;                                     // per item: kept for the scores if w = 1

  // dv: 0 without V. decode: for window_decode.h.
  WindowScratch(const Window& p, int64_t dv, bool decode) {
    const Segments segments(p, decode);
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
    const bool narrow = p.stored != p.dtype;
    const bool bf16 = p.dtype == DType::bf16;
    wide_keys = narrow || (decode && bf16) ? kBlock * round_up(p.d / 2, kMaxLanes) : 0;
    wide_values = narrow ? kBlock * round_up(dv / 2, kMaxLanes) : 0;
    rearranged = !bf16 || dv == 0 ? 0
                 : decode         ? (32 + 2 * kDecodeRows) * round_up(dv, 2 * kMaxLanes)
                                  : 5 * kMaxLanes * kMaxVectors * kMaxLanes;
    worker = queries + keys + values + tile + 2 * partial + 2 * kBlock + 4 * row + turned + wide_keys + wide_values +
             rearranged;
    stats = 2 * lanes;
    out = lanes * round_up(dv, 2 * kMaxLanes);
    logits = p.w == 1 && p.scores ? round_up(segments.count * segment_logits(p, segments), kMaxLanes) : 0;
  }

  // A segment's logits of an item, with padding for the last vector.
  static int64_t segment_logits(const Window& p, const Segments& segments) {
    return split_keys(p.n) * logit_pitch(segments) + kMaxLanes;
  }
  // The distance from a key's logits to the next key's.
  static int64_t logit_pitch(const Segments& segments) {
    const int64_t rows = segments.rows;
    return rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 8 ? 8 : round_up(rows, kMaxLanes);
  }
};

}  // namespace
}  // namespace kvops
