// What the Hopper kernels share: the roles in a block, and, for two of them, tiles of query rows.
//
// A block consists of two consumer warpgroups (128 threads each, as wgmma requires) and one producer warp. The
// producer's first thread has the copy engine fill a ring of stages in shared memory with keys. Each stage has two
// mbarriers, `full` and `empty`. Nothing else synchronizes the three, so one warpgroup can multiply while the other
// computes exponentials, and the copies run ahead of both. (In window_attention.cuh and panels.cuh the warpgroups take
// turns; the former has a whole producer warpgroup and more synchronization.)
//
// The G * w rows of one KV head are divided into tiles of 64. Padding rows, and rows that see no key, are zero: their
// logits are finite wherever the key is, and their results are weighted with 0 or not stored.
#pragma once
#include <cstdlib>
#include <string_view>
#include <type_traits>

#include "../../ops/window.h"
#include "../row_sum.cuh"
#include "engine.cuh"

namespace kvops::sm90 {
namespace {

constexpr int kGroups = 2;                       // consumer warpgroups
constexpr int kConsumers = 128 * kGroups;        // threads
constexpr int kThreads = kConsumers + 32;        // with the producer warp
constexpr int kAllConsumers = 1, kOwnGroup = 2;  // barriers; kOwnGroup and the next one are the groups' own
constexpr int kTurns = 1;                        // kernels that take turns have these two instead
constexpr int kSharedBytes = 226 * 1024;         // of the 227 KiB that a block may have; the rest is for alignment

// The query rows of a block: `group` query heads from `head` on, w rows each.
struct QueryRows {
  int64_t batch, head, group;

  KVOPS_HOST_DEVICE int count(const Window& p) const { return static_cast<int>(group * p.w); }
};

// The keys that the rows of a batch row see; the same in all lanes of the calling warp.
struct Seen {
  int first, last;  // some row sees first <= key < last
  int all;          // every row that counts sees first <= key < all
  int rows;         // number of rows that count

  __device__ Seen(const Window& p, int64_t batch)
      : first(static_cast<int>(p.first(batch))), last(first), all(0x7fffffff), rows(0) {
    for (int i = threadIdx.x % 32; i < p.w; i += 32) {
      const int limit = static_cast<int>(p.limit(batch, i));
      if (limit <= first) continue;
      last = max(last, limit);
      all = min(all, limit);
      ++rows;
    }
    last = __reduce_max_sync(kWarp, last);
    all = __reduce_min_sync(kWarp, all);
    rows = __reduce_add_sync(kWarp, rows);
  }
};

// Loads rows [first, first + count) of tile `tile` into shared memory, by one warp.
template <class T, int kDim>
__device__ inline void load_queries(const Window& p, const QueryRows& rows, int tile, int first, int count, T* to,
                                    bool wide) {
  constexpr int kPieces = kDim / kPiece<T>, kAtOnce = 32 / kPieces;  // pieces per row; rows at a time
  const int lane = threadIdx.x % 32, column = lane % kPieces * kPiece<T>, w = static_cast<int>(p.w);
  const int64_t start = p.first(rows.batch);
  for (const int end = first + count; first < end; first += 32) {
    const int index = tile * kRows + first + lane;  // each lane looks up one row
    uint64_t own = 0;
    if (first + lane < end && index < rows.count(p) && p.limit(rows.batch, index % w) > start)
      own = reinterpret_cast<uintptr_t>(p.q.row(rows.batch, rows.head + index / w, index % w));
#pragma unroll 4
    for (int i = 0; i < min(32, end - first); i += kAtOnce) {
      const int row = i + lane / kPieces;
      const char* from = reinterpret_cast<const char*>(__shfl_sync(kWarp, own, row));
      uint4 piece{};
      if (from) {
        from += column * p.q.stride_d;
        if (wide) {
          piece = __ldg(reinterpret_cast<const uint4*>(from));
        } else {
          unsigned x[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] = __ldg(reinterpret_cast<const unsigned short*>(from + j * p.q.stride_d));
          piece = make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
        }
      }
      *reinterpret_cast<uint4*>(to + slab_at(first + row, column, kRows)) = piece;
    }
  }
}

// Whether load_queries() can read whole pieces.
inline bool wide_queries(const Window& p) {
  const auto of = [](int64_t size, int64_t stride) { return size > 1 ? static_cast<uint64_t>(stride) : 0; };
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.q.data) | of(p.b, p.q.stride_b) |
                        of(p.heads * p.group, p.q.stride_h) | of(p.w, p.q.stride_w);
  return p.q.stride_d == 2 && bits % 16 == 0;
}

// One side's position in a ring of stages. A stage's barriers advance to their next phase with each round.
struct Ring {
  uint64_t* full;   // [stages]
  uint64_t* empty;  // [stages]
  int stages;
  int stage = 0;
  unsigned phase = 0;

  // Called by one thread. warps: the number of warps that read a stage.
  __device__ void init(int warps) const {
    for (int s = 0; s < stages; ++s) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, warps);
    }
  }
  __device__ void advance(int by) {  // at most `stages`
    stage += by;
    if (stage < stages) return;
    stage -= stages;
    phase ^= 1;
  }
  // The producer calls wait_empty() before it writes to the stage itself, or fill() before it copies this many bytes
  // there.
  __device__ void wait_empty() const { barrier_wait(empty + stage, phase ^ 1); }
  __device__ uint64_t* fill(int bytes) const {
    wait_empty();
    barrier_announce(full + stage, bytes);
    return full + stage;
  }
  // The consumers call wait() before they read the stage, and each warp release() when it has.
  __device__ void wait() const { barrier_wait(full + stage, phase); }
  __device__ void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
  }
};

// The consumer warpgroups take turns to start products: group 0 goes first, and neither goes twice in a row. So one
// multiplies while the other works on its products. Does nothing if they are not `taken`.
struct Turns {
  bool taken;
  int group;

  __device__ Turns(bool taken, int group) : taken(taken), group(group) {
    if (group == 1) pass();
  }
  __device__ void take() const {
    if (taken) meet(kConsumers, kTurns + group);
  }
  __device__ void pass() const {
    if (taken) come_by(kConsumers, kTurns + 1 - group);
  }
};

// Copies kKeys rows of K or V, starting at `key`, [kKeys, kDim].
template <class T, int kDim, int kKeys>
__device__ inline void copy_keys(const TensorMap& map, uint64_t* full, T* to, int key, int head, int batch) {
#pragma unroll
  for (int slab = 0; slab < kDim / kSlab; ++slab)
    copy_box(map, full, to + slab * kSlab * kKeys, slab * kSlab, key, head, batch);
}

// Whether there are Hopper kernels for such keys, and KVOPS_SM90=0 does not leave them to the portable ones.
inline bool serves(DType dtype, int64_t d, int64_t n) {
  const char* const wanted = std::getenv("KVOPS_SM90");
  return !(wanted && std::string_view(wanted) == "0") && (dtype == DType::f16 || dtype == DType::bf16) &&
         (d == 64 || d == 128 || d == 256) && n > 0 && n < 1 << 30 && is_hopper();
}
// The same, also for the queries.
inline bool serves(const Window& p) {
  return p.softcap == 0 && !p.rope.pairs && serves(p.stored, p.d, p.n);
}

// Calls fn(T{}) with the 16-bit element type.
template <class Fn>
inline void with_element(DType dtype, const Fn& fn) {
  if (dtype == DType::f16)
    fn(Half{});
  else
    fn(BFloat16{});
}

// Calls fn(integral constant) with a head dim that serves() has accepted.
template <class Fn>
inline void with_head_dim(int64_t d, const Fn& fn) {
  if (d == 64)
    fn(std::integral_constant<int, 64>{});
  else if (d == 128)
    fn(std::integral_constant<int, 128>{});
  else
    fn(std::integral_constant<int, 256>{});
}

}  // namespace
}  // namespace kvops::sm90
