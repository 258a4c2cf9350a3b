// Moves rows to the front of the tensor that they lie in, with many blocks at once.
//
// A chain is one head of K or V (or a column slice of it). Its slot i receives a row from slot i or a later one. A
// chunk of consecutive slots may therefore be written as soon as it and all chunks before it have been read: later
// chunks read only later slots. Each block handles one chunk:
//
//   take a ticket    the chunks of a chain ascend in ticket order, so every block that another waits for has started
//   read             all rows of the chunk into registers
//   wait             until all chunks before it have been read
//   write
//
// The wait is a decoupled look-back. Each chunk has a flag: kRead once its own rows are in registers, kAllRead once
// those of all chunks before it are too. A warp reads 32 flags at a time, backward, until it finds kAllRead. A flag
// costs 4 bytes per chunk of 32 KiB, and a call with only one chunk per chain needs neither flags nor tickets.
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

// The chunk of a block.
class InPlaceChunk {
 public:
  unsigned chain, chunk;

  // Called by the whole block; contains a barrier.
  __device__ InPlaceChunk(const InPlacePlan& chunks, const InPlaceMemory& memory) : flags_(nullptr) {
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

  // Returns when all chunks up to this one have been read. Called by the whole block, once its own rows are in
  // registers.
  __device__ void wait_for_reads() const {
    __syncthreads();  // the whole chunk has been read
    if (!flags_) return;
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) store_release(flags_ + chunk, chunk ? kRead : kAllRead);
      for (int last = static_cast<int>(chunk) - 1; last >= 0; last -= 32) {
        const int at = last - static_cast<int>(threadIdx.x);
        unsigned flag;
        do flag = at >= 0 ? load_acquire(flags_ + at) : kAllRead;
        while (__any_sync(kWarp, flag == kUnread));
        if (__any_sync(kWarp, flag == kAllRead)) break;
      }
      if (threadIdx.x == 0 && chunk) store_release(flags_ + chunk, kAllRead);
    }
    __syncthreads();  // the chunks before have been read
  }

 private:
  static constexpr unsigned kUnread = 0, kRead = 1, kAllRead = 2;
  unsigned* flags_;  // of the chain, or null
};

}  // namespace
}  // namespace kvops
