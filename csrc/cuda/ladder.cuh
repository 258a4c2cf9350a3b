// What ladder_compact_ and ladder_gather share: the layers of one launch, how far slots move, and kernel selection.
//
// A launch takes its layers by value. Their strides are usually the same, so it takes one set of strides, and an
// address and an offset per layer. Layers with different strides get launches of their own.
//
// The source of a row is plain arithmetic (LadderMoves::source), but it loops over the passes with a division in each,
// and all lanes that share a row would repeat it. So a block's threads compute it once per slot, into shared memory.
#pragma once
#include "../ops/ladder.h"
#include "move.cuh"
#include "rope.cuh"

namespace kvops {
namespace {

constexpr int kLadderLayers = 48;                        // per launch, so that the parameters stay within CUDA's 4 KB
constexpr int kLadderRows = kAhead / 2;                  // of a tile, per lane: two units each
constexpr int kLadderTile = kMoveThreads * kLadderRows;  // rows per tile at most

// Layers with the same strides; only addresses and offsets differ.
struct LadderBatch {
  struct Layer {
    char *in[2], *out[2];  // K, V
    int32_t offset;
  };
  KVView in[2], out[2];  // K, V of the first layer
  int64_t b, heads;
  LadderRope rope;
  LadderMoves moves;
  Layer layers[kLadderLayers];
};
static_assert(sizeof(LadderBatch) + 64 <= 4096);

// One head of K or V of a layer; `chain` is its index.
struct LadderChain {
  const char* in;
  char* out;
  int64_t in_stride, out_stride;  // bytes from slot to slot
  int32_t offset;

  __device__ LadderChain(const LadderBatch& p, unsigned chain, unsigned values) {
    const unsigned heads = static_cast<unsigned>(p.heads), rows = static_cast<unsigned>(p.b);
    const unsigned h = chain % heads, b = chain / heads % rows;
    const LadderBatch::Layer& layer = p.layers[chain / heads / rows];
    const KVView &from = p.in[values], &to = p.out[values];
    in = layer.in[values] + b * from.stride_b + h * from.stride_h;
    out = layer.out[values] + b * to.stride_b + h * to.stride_h;
    in_stride = from.stride_n;
    out_stride = to.stride_n;
    offset = layer.offset;
  }
};

// T: the dtype of keys that are rotated as they move, otherwise void.
template <class T, class Unit>
__device__ RowUnits ladder_row(const LadderBatch& p, unsigned values) {
  RowUnits row = {static_cast<int>(p.in[values].row_bytes / sizeof(Unit)), 0, p.rope.interleaved};
  if constexpr (!std::is_void_v<T>)
    row.turning = values ? 0 : static_cast<int>(p.rope.pairs * sizeof(T) / sizeof(Unit));
  return row;
}

// shifts[i]: how many slots the row for slot start + i moves; 0 if it does not move, or past the end.
__device__ inline void ladder_shifts(const LadderMoves& moves, int32_t offset, uint32_t start, int rows,
                                     int32_t* shifts) {
  for (int i = threadIdx.x; i < rows; i += kMoveThreads) {
    const uint32_t slot = start + i;  // in a tile past the end it may exceed int32
    int32_t run;
    shifts[i] = slot < static_cast<uint32_t>(moves.kept) ? moves.source(slot, offset, run) - slot : 0;
  }
}

// A lane's state for rotating keys of T; empty if they only move.
template <class T, class Unit>
struct LadderTurn : SlotTurn<T, Unit> {};
template <class Unit>
struct LadderTurn<void, Unit> {};

// Lanes per row of K or V, whichever is wider: two units each.
template <class Unit>
inline int64_t ladder_lanes(const LadderBatch& p) {
  const int64_t k = p.in[0].row_bytes, v = p.in[1].row_bytes;
  return ((k > v ? k : v) / static_cast<int64_t>(sizeof(Unit)) + 1) / 2;
}

// Calls fn(batch, layers, bits) for groups of layers with the same strides, as many at a time as fit. bits: the bitwise
// or of all their addresses.
template <class Fn>
inline void for_ladder_batches(const LadderParams& p, const Fn& fn) {
  LadderBatch batch = {};
  batch.b = p.b;
  batch.heads = p.heads;
  batch.rope = p.rope;
  batch.moves = p.moves;
  for (int64_t i = 0; i < p.num_layers;) {
    const LadderLayer& first = p.layers[i];
    batch.in[0] = first.k, batch.in[1] = first.v, batch.out[0] = first.k_out, batch.out[1] = first.v_out;
    uint64_t bits = 0;
    int count = 0;
    for (; i < p.num_layers && count < kLadderLayers; ++i, ++count) {
      const LadderLayer& x = p.layers[i];
      if (!(x.k.same_strides(first.k) && x.v.same_strides(first.v) && x.k_out.same_strides(first.k_out) &&
            x.v_out.same_strides(first.v_out)))
        break;
      batch.layers[count] = {{x.k.data, x.v.data}, {x.k_out.data, x.v_out.data}, x.offset};
      bits |= address_bits(x.k, p.b, p.heads, p.moves.n) | address_bits(x.v, p.b, p.heads, p.moves.n) |
              address_bits(x.k_out, p.b, p.heads, p.moves.kept) | address_bits(x.v_out, p.b, p.heads, p.moves.kept);
    }
    fn(batch, count, bits);
  }
}

template <class T, class Unit>
struct LadderTypes {};

// Calls fn(LadderTypes<T, Unit>{}).
template <class Fn>
inline void with_ladder_types(const LadderParams& p, uint64_t bits, const Fn& fn) {
  if (!p.rope.inv_freq) return with_unit(bits, [&](auto unit) { fn(LadderTypes<void, decltype(unit)>{}); });
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_turning_unit<T>(bits | static_cast<uint64_t>(p.rope.pairs) * sizeof(T),
                         [&](auto unit) { fn(LadderTypes<T, decltype(unit)>{}); });
  });
}

}  // namespace
}  // namespace kvops
