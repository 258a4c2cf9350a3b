// Rows that a block multiplies its keys with, panel by panel in shared memory, for Hopper: what key_similarity and
// value_norm share (../panels.cuh is the portable counterpart).
//
// A block has 128 keys, 64 for each of its two warpgroups. They stay in shared memory, while panels of the other rows
// pass through a ring of stages. The warpgroups take turns: one multiplies while the other works on its products. A
// warpgroup may need no more panels before the other one; the pass ends once neither does. With d = 128, a panel of 128
// rows takes the tensor cores of a multiprocessor 512 cycles per warpgroup, and 32 KB from L2 for both: 32 bytes per
// cycle.
#pragma once
#include "tile.cuh"

namespace kvops::sm90 {
namespace {

constexpr int kBlockKeys = kGroups * kRows, kAllGroups = (1 << kGroups) - 1;
template <int kDim>
constexpr int kPanelRows = kDim == 256 ? 64 : 128;

// Offsets in shared memory; the keys, [kGroups, kRows, d], come first.
template <int kDim>
struct PanelsShared {
  static constexpr int kKeys = kBlockKeys * kDim * 2, kPanel = kPanelRows<kDim> * kDim * 2;
  static constexpr int kFit = (kSharedBytes - kKeys - 256) / kPanel, kStages = kFit < 6 ? kFit : 6;
  static constexpr int kPanels = kKeys, kFull = kPanels + kStages * kPanel, kEmpty = kFull + 8 * kStages;
  static constexpr int kLoaded = kEmpty + 8 * kStages, kDone = kLoaded + 8, kUnneeded = kDone + 4 * kGroups;
  static constexpr int kBytes = kUnneeded + 4 * kStages;
  static_assert(kStages > 1 && kBytes <= kSharedBytes);
};

// Where rows of a tensor map start.
struct MapRows {
  int row, head, batch;
};

template <class T, int kDim>
struct Panels {
  using Shared = PanelsShared<kDim>;
  static constexpr int kPanel = kPanelRows<kDim>;
  using Products = float[kPanel / 2];  // a thread's own, see Accumulator

  T *keys, *stages;
  Ring ring;
  uint64_t* loaded;
  int* done;               // [kGroups]: how many warps need no more panels
  volatile int* unneeded;  // [stages], bits: the groups that do not need this panel. All: the pass ends before it

  // Called by the whole block.
  __device__ explicit Panels(unsigned char* shared)
      : keys(reinterpret_cast<T*>(shared)),
        stages(reinterpret_cast<T*>(shared + Shared::kPanels)),
        ring{reinterpret_cast<uint64_t*>(shared + Shared::kFull), reinterpret_cast<uint64_t*>(shared + Shared::kEmpty),
             Shared::kStages},
        loaded(reinterpret_cast<uint64_t*>(shared + Shared::kLoaded)),
        done(reinterpret_cast<int*>(shared + Shared::kDone)),
        unneeded(reinterpret_cast<int*>(shared + Shared::kUnneeded)) {
    if (threadIdx.x == 0) {
      done[0] = done[1] = 0;
      ring.init(kConsumers / 32);
      barrier_init(loaded, 1);
      barriers_made();
    }
    __syncthreads();
  }

  __device__ T* panel(const Ring& at) const { return stages + at.stage * kPanel * kDim; }

  // The producer, one thread: copies the block's keys and `count` panels, panel i from row row_of(i) on, as long as
  // some warp needs them.
  template <class RowOf>
  __device__ void copy(const TensorMap& key_map, MapRows from, const TensorMap& panel_map, int head, int count,
                       const RowOf& row_of) {
    barrier_announce(loaded, Shared::kKeys);
    for (int group = 0; group < kGroups; ++group)
      copy_keys<T, kDim, kRows>(key_map, loaded, keys + group * kRows * kDim, from.row + group * kRows, from.head,
                                from.batch);
    for (int i = 0; i < count; ++i, ring.advance(1)) {
      ring.wait_empty();
      int groups = 0;
      for (int group = 0; group < kGroups; ++group) groups |= (atomicAdd(done + group, 0) == 4) << group;
      unneeded[ring.stage] = groups;
      if (groups == kAllGroups) return barrier_arrive(ring.full + ring.stage);
      barrier_announce(ring.full + ring.stage, Shared::kPanel);
      copy_keys<T, kDim, kPanel>(panel_map, ring.full + ring.stage, panel(ring), row_of(i), head, 0);
    }
  }

  // A consumer warp says that it needs no more panels, once. It still gets those that are on their way, and later ones
  // as long as its group needs them.
  __device__ void leave() const {
    if (threadIdx.x % 32 == 0) atomicAdd(done + threadIdx.x / 128, 1);
  }

  // A consumer warpgroup: calls use(products, i) for panels i = 0, 1, ... of `count`.
  template <class Use>
  __device__ void multiply(int count, const Use& use) {
    const int group = threadIdx.x / 128;
    const Turns turns(true, group);
    barrier_wait(loaded, 0);
    for (int i = 0; i < count; ++i, ring.advance(1)) {
      Products x;
      ring.wait();
      const int groups = unneeded[ring.stage];
      if (groups == kAllGroups) return;
      turns.take();
      if (groups >> group & 1) {
        turns.pass();
        ring.release();
        continue;
      }
      begin_keys<T, kDim, kPanel>(x, keys + group * kRows * kDim, panel(ring));
      turns.pass();
      wait_products<0>(x);
      ring.release();
      use(x, i);
    }
  }
};

// [batch, heads, rows, d], of which a tensor map is made.
struct MappedRows {
  KVView view;
  int64_t batch, heads, rows;
};

// Calls fn(T{}, d as a constant, tensor maps of the keys and of the panels' rows). Returns false, without calling it,
// if a map cannot be made.
template <class Fn>
inline bool with_panels(DType dtype, int64_t d, const MappedRows& keys, const MappedRows& others, const Fn& fn) {
  bool made = false;
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    with_head_dim(d, [&](auto dim) {
      TensorMap own, panels;
      made =
          tensor_map<T>(own, keys.view, keys.batch, keys.heads, keys.rows, kRows) &&
          tensor_map<T>(panels, others.view, others.batch, others.heads, others.rows, kPanelRows<decltype(dim)::value>);
      if (made) fn(element, dim, own, panels);
    });
  });
  return made;
}

}  // namespace
}  // namespace kvops::sm90
