// The twins of csrc/cuda/sm90/engine.cuh: wgmma, TMA and mbarriers, as the CUDA simulator has them. A copy is there at
// once and a product is made where it is asked for, so what is not simulated is that both take their time: a consumer
// that forgets to wait for its own product, or a store that needs a proxy fence.
#pragma once

namespace kvops::sm90 {
namespace {

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, Half>)
    return {__half_as_ushort(__float2half_rn(x))};
  else
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

template <class T, int kDim, int kKeys>
void multiply_keys(float (&x)[kKeys / 2], const T* q, const T* k) {
  const int thread = threadIdx.x % 128;
  for (int i = 0; i < kKeys / 2; ++i) {
    x[i] = 0;
    for (int c = 0; c < kDim; ++c)
      x[i] += to_float(q[slab_at(Accumulator::row(thread, i), c, kRows)]) *
              to_float(k[slab_at(Accumulator::column(thread, i), c, kKeys)]);
  }
}

template <class T, int kDim, int kKeys>
void add_values(float (&o)[kDim / 2], const float (&weights)[kKeys / 2], const T* v) {
  struct {
    const float* own;
    const float* lanes[32];
  } mine{weights, {}};
  cudasim::sim.meet_warp({"wgmma"}, ~0u, mine, false, [](decltype(mine)* const* lanes) {
    for (int i = 0; i < 32; ++i)
      for (int j = 0; j < 32; ++j) lanes[i]->lanes[j] = lanes[j]->own;
  });
  const int thread = threadIdx.x % 128;
  float rows[kRows / 4][kKeys];  // those of the warp
  {
    cudasim::Quiet quiet;
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < kKeys / 2; ++i)
        rows[Accumulator::row(thread / 32 * 32 + l, i) % 16][Accumulator::column(l, i)] =
            to_float(rounded<T>(mine.lanes[l][i]));
  }
  __syncwarp();
  for (int i = 0; i < kDim / 2; ++i)
    for (int j = 0; j < kKeys; ++j)
      o[i] +=
          rows[Accumulator::row(thread, i) % 16][j] * to_float(v[slab_at(j, Accumulator::column(thread, i), kKeys)]);
}

inline float exp2_fast(float x) { return exp2f(x); }

inline void meet(int threads, int id, CUDASIM_AT) {
  cudasim::Quiet quiet;
  cudasim::sim.meet(cudasim::sim.block->named_barriers[id], threads, {"bar.sync", at}, nullptr, true, [] {});
}
inline void share_stores(int threads, int id, CUDASIM_AT) { meet(threads, id, at); }

struct MBarrier {  // in the 8 bytes of one
  uint8_t expected, pending;
  uint16_t phase;
  int32_t bytes;  // that are to come

  static MBarrier& at(uint64_t* p) { return *reinterpret_cast<MBarrier*>(p); }
};

inline void barrier_settle(uint64_t* p) {
  cudasim::happens_before(reinterpret_cast<char*>(p));
  MBarrier& barrier = MBarrier::at(p);
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  std::erase_if(cudasim::sim.block->mbarrier_waiters, [&](auto& waiter) {
    if (waiter.first == p) cudasim::sim.make_ready(waiter.second);
    return waiter.first == p;
  });
}
inline void barrier_init(uint64_t* p, int arrivals) {
  cudasim::Quiet quiet;
  MBarrier::at(p) = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
inline void barriers_made() {}
inline void barrier_arrive(uint64_t* p) {
  cudasim::Quiet quiet;
  if (!MBarrier::at(p).pending) cudasim::sim.fail("more threads arrive at an mbarrier than it was made for");
  --MBarrier::at(p).pending;
  barrier_settle(p);
}
inline void barrier_announce(uint64_t* p, int bytes) {
  {
    cudasim::Quiet quiet;
    MBarrier::at(p).bytes += bytes;
  }
  barrier_arrive(p);
}
inline void barrier_wait(uint64_t* p, unsigned phase, CUDASIM_AT) {
  cudasim::Quiet quiet;
  while (MBarrier::at(p).phase % 2 == phase) {
    cudasim::sim.block->mbarrier_waiters.emplace_back(p, cudasim::sim.self);
    cudasim::sim.self->site = {"mbarrier.try_wait", at};
    cudasim::sim.wait();
  }
  cudasim::happens_after(reinterpret_cast<char*>(p));
}

struct TensorMap {
  const char* data;
  uint64_t strides[3];
  int64_t n;
  int keys;
};

template <class T>
bool tensor_map(TensorMap& map, const KVView& x, int64_t b, int64_t heads, int64_t n, int keys) {
  map = {x.data, {}, n, keys};
  return copy_strides(map.strides, x, b, heads, n);
}

template <class T>
void copy_box(const TensorMap& map, uint64_t* barrier, T* to, int column, int key, int head, int batch) {
  const char* const from = map.data + batch * map.strides[2] + head * map.strides[1] + column * sizeof(T);
  for (int j = 0; j < map.keys; ++j)
    for (int c = 0; c < kSlab; ++c)
      to[slab_at(j, c, map.keys)] =
          key + j < map.n ? reinterpret_cast<const T*>(from + (key + j) * map.strides[0])[c] : T{};
  cudasim::Quiet quiet;
  MBarrier::at(barrier).bytes -= map.keys * kSlab * static_cast<int>(sizeof(T));
  if (MBarrier::at(barrier).bytes < 0) cudasim::sim.fail("more bytes arrive at an mbarrier than were announced");
  barrier_settle(barrier);
}

inline unsigned char* aligned_shared() {
  unsigned char* const bytes = cudasim::sim.block->dynamic_shared.get();
  return bytes + (-reinterpret_cast<uintptr_t>(bytes) & 1023);
}

inline bool is_hopper() { return true; }

}  // namespace
}  // namespace kvops::sm90
