// LaCache's ladder on the CPU: code shared by ladder_compact_ and ladder_gather.
//
// The source of a row has a closed form (LadderMoves::source). It is evaluated once per run of rows that move together,
// not per row. Rotated keys need new cosines and sines only when their shift changes: once per ladder, and never after
// the last ladder, where most rows are.
#pragma once
#include "../dispatch.h"
#include "../ops/ladder.h"
#include "rope.h"

namespace kvops::KVOPS_ISA {
namespace {

// A slot and the source of its row.
struct LadderWalk {
  const LadderMoves& moves;
  int32_t offset, slot, source = 0, run = 0;

  LadderWalk(const LadderMoves& m, int32_t o, int64_t first)
      : moves(m), offset(o), slot(first < m.kept ? static_cast<int32_t>(first) : m.kept) {
    find();
  }
  void next() {
    ++slot, ++source;
    if (--run <= 0) find();
  }

 private:
  void find() {
    if (slot < moves.kept) source = moves.source(slot, offset, run);
  }
};

struct MoveRow {
  void operator()(char* to, const char* from, int64_t bytes, int32_t, bool stream) const {
    if (stream)
      StreamRow{}(to, from, bytes);
    else
      CopyRow{}(to, from, bytes);
  }
};

template <class T>
struct TurnRow {
  LadderRope rope;
  float *cos, *sin;
  int32_t at = 0;  // the shift that these cosines and sines belong to

  void operator()(char* to, const char* from, int64_t bytes, int32_t delta, bool stream) {
    if (delta == 0) return MoveRow{}(to, from, bytes, 0, stream);
    if (delta != at) angles(rope.inv_freq, rope.pairs, at = delta, cos, sin);
    if (stream)
      rotate_row<T>(to, from, bytes, cos, sin, rope.pairs, rope.interleaved, StreamRegister{});
    else
      rotate_row<T>(to, from, bytes, cos, sin, rope.pairs, rope.interleaved, PutRegister{});
  }
};

// Moves the rows of `slots`. If both strips are the same, the move is in place and rows that stay are not touched. Rows
// whose source is `stream_from` or more slots away are written with streaming stores.
template <class Row>
inline void move_rows(const LadderMoves& moves, int32_t offset, const Strip in, const Strip out, Share slots,
                      int64_t stream_from, Row row) {
  const bool in_place = in.rows.data == out.rows.data;
  LadderWalk ahead(moves, offset, slots.first + rows_ahead(in.bytes));
  for (LadderWalk at(moves, offset, slots.first); at.slot < slots.last; at.next()) {
    if (ahead.slot < moves.kept) {
      prefetch_row(in.row(ahead.source), in.bytes);
      ahead.next();
    }
    const int32_t distance = at.source - at.slot;
    if (in_place && distance == 0) continue;
    row(out.row(at.slot), in.row(at.source), in.bytes, -distance, distance >= stream_from);
  }
}

// Floats of scratch per worker: cosines and sines, each rounded up to a 64-byte register.
inline int64_t ladder_scratch(const LadderRope& rope) {
  return rope.inv_freq ? 2 * ((rope.pairs + 15) / 16 * 16) : 0;
}

constexpr int64_t kNeverStream = int64_t{1} << 62;

// The same for one strip of K (rotated, with RoPE) or V. Streams only if the addresses in `to` allow it. `tables` is
// the worker's scratch.
inline void move_strip(const LadderParams& p, int32_t offset, const KVView& to, bool is_key, const Strip in,
                       const Strip out, Share slots, int64_t stream_from, float* tables) {
  if (!is_key || !p.rope.inv_freq) {
    const bool may_stream = streamable(to) && out.bytes % VB == 0;
    move_rows(p.moves, offset, in, out, slots, may_stream ? stream_from : kNeverStream, MoveRow{});
    return;
  }
  with_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool may_stream = streamable_turned<T>(to, p.rope.pairs);
    TurnRow<T> row{p.rope, tables, tables + ladder_scratch(p.rope) / 2};
    move_rows(p.moves, offset, in, out, slots, may_stream ? stream_from : kNeverStream, row);
  });
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
