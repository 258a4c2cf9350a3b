// Moves rows to the front of the tensor that they lie in, with many blocks at once.
//
// A chain is one head of K or V (or a column slice of it). Its slot i receives a row from slot i or a later one, and
// sources ascend. Each block handles one chunk of consecutive slots:
//
//   take a ticket    the chunks of a chain ascend in ticket order, so every block that another waits for has started
//   read             all rows of the chunk into registers
//   wait             until the rows that the chunk overwrites have been read
//   write
//
// The rows that a chunk overwrites are read by this and earlier chunks. As sources ascend, the slots that receive them
// are consecutive and no more than the chunk has, so they lie in two chunks at most, which a search over the chunks'
// first slots finds. Usually they were read long ago: if a quarter of the rows is kept, slot i is read for slot i / 4.
// A chunk has a flag that is set once its rows are in registers. It costs 4 bytes per 32 KiB, and a call with only one
// chunk per chain needs neither flags nor tickets.
#pragma once
#include "cluster.cuh"
#include "move.cuh"

namespace kvops {
namespace {

constexpr int kInPlaceUnits = 8;  // per lane, in registers

// How the slots of all chains are divided into chunks.
struct InPlacePlan {
  int64_t chains, count;  // count: chunks per chain
  int rows;               // slots per chunk

  static InPlacePlan of(int64_t slots, int64_t chains, int rows) { return {chains, (slots + rows - 1) / rows, rows}; }
};

// Must be zeroed before the launch.
struct InPlaceMemory {
  unsigned* next;   // the next ticket
  unsigned* flags;  // [chains, chunks]

  InPlaceMemory(const InPlacePlan& chunks, Sections& sections) {
    const bool one = chunks.count <= 1;
    next = sections.add<unsigned>(one ? 0 : 1);
    flags = sections.add<unsigned>(one ? 0 : chunks.chains * chunks.count);
  }
};

// The first of [0, end) for which holds(), or `end`. It must hold for all after one for which it does. Called by a
// whole warp, whose lanes look at 32 places at a time.
template <class Fn>
__device__ inline unsigned first_of(unsigned end, const Fn& holds) {
  unsigned low = 0;
  for (unsigned size = end; size;) {  // it is in [low, low + size]
    const unsigned step = (size + 31) / 32, at = step * (threadIdx.x % 32);
    const unsigned before = __popc(__ballot_sync(kWarp, at < size && !holds(low + at)));
    if (before == 0) break;
    const unsigned past = step * (before - 1) + 1;
    low += past;
    size = min(size, step * before) - past;
  }
  return low;
}

// Bits of a unit, which are there once the unit has been loaded.
template <class Unit>
__device__ inline unsigned some_bits(const Unit& x) {
  unsigned bits = 0;
  memcpy(&bits, &x, sizeof(Unit) < 4 ? sizeof(Unit) : 4);
  return bits;
}

// The chunk of a block.
class InPlaceChunk {
 public:
  unsigned chain, chunk;

  // Called by the whole block; contains a barrier.
  __device__ InPlaceChunk(const InPlacePlan& chunks, const InPlaceMemory& memory)
      : rows_(static_cast<unsigned>(chunks.rows)), flags_(nullptr) {
    __shared__ unsigned ticket;
    if (chunks.count > 1) {
      if (threadIdx.x == 0) ticket = atomicAdd(memory.next, 1u);
      __syncthreads();  // the ticket is written
    }
    const unsigned taken = chunks.count > 1 ? ticket : blockIdx.x, chains = static_cast<unsigned>(chunks.chains);
    chain = taken % chains;
    chunk = taken / chains;
    if (chunks.count > 1) flags_ = memory.flags + chain * chunks.count;
  }

  // Returns when all rows that this chunk overwrites have been read. Called by the whole block. reads_ahead(slot):
  // whether slot (of the chain, before this chunk) receives a row of this chunk's first slot or a later one. `rows`
  // depends on every row that the thread reads: a load into registers may otherwise still be in flight behind a
  // barrier.
  template <class Fn>
  __device__ void wait_for_reads(unsigned rows, const Fn& reads_ahead) const {
    unsigned after = chunk;  // the first chunk all of whose slots read ahead: the first such slot is in the one before
    if (flags_ && threadIdx.x < 32)  // while rows arrive
      after = first_of(chunk, [&](unsigned c) { return reads_ahead(c * rows_); });
    __syncthreads_or(rows != 0);  // the whole chunk has been read
    if (!flags_) return;
    if (threadIdx.x == 0) store_release(flags_ + chunk, 1u);
    const unsigned reader = after - 1 + threadIdx.x;
    if (threadIdx.x < 2 && reader < chunk)  // wraps around if there is none before
      while (!load_acquire(flags_ + reader)) {
      }
    __syncthreads();  // so have the rows to overwrite
  }

 private:
  unsigned rows_;    // per chunk
  unsigned* flags_;  // of the chain, or null
};

}  // namespace
}  // namespace kvops
