// The only access to what Hopper has and other GPUs lack: wgmma, the copy engine (TMA), and the mbarriers that signal
// the arrival of a copy. This file uses CuTe and CUTLASS; the tests' simulator has a twin of each function.
//
// Operands are laid out in shared memory in a form that both wgmma and TMA support, CuTe's 128-byte swizzle: slabs of
// 64 elements (128 bytes) of each row, with the eight 16-byte pieces of a row permuted by row % 8. A copy is a box of
// one slab. V is laid out like K, key by key, and wgmma reads it transposed. All operands start at multiples of 1024
// bytes.
#pragma once
#ifdef __CUDACC__
#include <cute/tensor.hpp>
// CuTe's first header must come first.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cutlass/cuda_host_adapter.hpp>
#endif

#include "../vec.cuh"

namespace kvops::sm90 {
namespace {

constexpr int kRows = 64;  // query rows per tile: the M of a wgmma
constexpr int kSlab = 64;  // elements

// The position of element (row, column) in a [rows, d] operand.
KVOPS_HOST_DEVICE constexpr int slab_at(int row, int column, int rows) {
  return column / kSlab * kSlab * rows + row * kSlab + ((column / 8 ^ row) % 8) * 8 + column % 8;
}

// The layout of a warpgroup's accumulators: thread t's i-th one is element (row(t, i), column(t, i)) of the tile. Each
// thread has two rows, 8 apart, and shares them with its neighbours in groups of four lanes.
struct Accumulator {
  KVOPS_HOST_DEVICE static constexpr int row(int thread, int i) {
    return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
  }
  KVOPS_HOST_DEVICE static constexpr int column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }
};

// The strides of tokens, heads and batch rows, in bytes, as TMA needs them. False if TMA does not support them.
inline bool copy_strides(uint64_t (&strides)[3], const KVView& x, int64_t b, int64_t heads, int64_t n) {
  if (x.table) return false;  // pages have no common stride; the portable kernels look them up
  // The stride of a dim of size one is free.
  const int64_t given[] = {n > 1 ? x.stride_n : x.row_bytes, heads > 1 ? x.stride_h : x.row_bytes,
                           b > 1 ? x.stride_b : x.row_bytes};
  for (int i = 0; i < 3; ++i) {
    if (given[i] <= 0 || given[i] % 16 || given[i] >= int64_t{1} << 40) return false;
    strides[i] = static_cast<uint64_t>(given[i]);
  }
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace
}  // namespace kvops::sm90

#ifdef __CUDACC__
namespace kvops::sm90 {
namespace {

using cute::Int;
using cute::Shape;
using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;

template <class T>
using Element = std::conditional_t<std::is_same_v<T, Half>, cute::half_t, cute::bfloat16_t>;

// Q [kRows, kDim] times K [kKeys, kDim] transposed, both in shared memory.
template <class T, int kDim, int kKeys>
struct Logits {
  using Atom = cute::GMMA::Layout_K_SW128_Atom<Element<T>>;
  using Q = decltype(cute::tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kDim>>{}));
  using K = decltype(cute::tile_to_shape(Atom{}, Shape<Int<kKeys>, Int<kDim>>{}));
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element<T>, Element<T>, float, Shape<Int<kRows>, Int<kKeys>, Int<kDim>>>()));
};

// Weights [kRows, kKeys] in registers, times V, which wgmma reads as [kDim, kKeys].
template <class T, int kDim, int kKeys>
struct Values {
  using Atom = cute::GMMA::Layout_MN_SW128_Atom<Element<T>>;
  using V = decltype(cute::tile_to_shape(Atom{}, Shape<Int<kDim>, Int<kKeys>>{}, cute::Step<cute::_2, cute::_1>{}));
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element<T>, Element<T>, float, Shape<Int<kRows>, Int<kDim>, Int<kKeys>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
  // A thread's weights are its accumulators of the logits, in the same order.
  using Weights = cute::Layout<Shape<Shape<cute::_2, cute::_2, cute::_2>, cute::_1, Int<kKeys / 16>>>;
};

// Checks slab_at() and Accumulator against CuTe. Layouts are linear in the bits of an index, so powers of two suffice.
constexpr int next_bit(int i) {
  return i ? 2 * i : 1;
}
template <class Layout>  // (thread, index of its value) -> row + kRows * column
constexpr bool lies_as_accumulator(int values) {
  for (int t = 0; t < 128; t = next_bit(t))
    for (int i = 0; i < values; i = next_bit(i))
      if (static_cast<int>(Layout{}(t, i)) != Accumulator::row(t, i) + kRows * Accumulator::column(t, i)) return false;
  return true;
}
template <class Layout, bool kTransposed = false>  // (row, column) -> element
constexpr bool lies_in_slabs(int rows, int columns) {
  const auto plain = cute::get_nonswizzle_portion(Layout{});
  const auto swizzle = cute::get_swizzle_portion(Layout{});  // of bytes
  for (int r = 0; r < rows; r = next_bit(r))
    for (int c = 0; c < columns; c = next_bit(c))
      if (static_cast<int>(swizzle(2 * (kTransposed ? plain(c, r) : plain(r, c)))) != 2 * slab_at(r, c, rows))
        return false;
  return true;
}
template <class T, int kDim, int kKeys>
constexpr bool lies_as_expected() {
  using L = Logits<T, kDim, kKeys>;
  using V = Values<T, kDim, kKeys>;
  return lies_in_slabs<typename L::Q>(kRows, kDim) && lies_in_slabs<typename L::K>(kKeys, kDim) &&
         lies_in_slabs<typename V::V, true>(kKeys, kDim) &&
         lies_as_accumulator<typename L::Mma::Atom::LayoutC_TV>(kKeys / 2) &&
         lies_as_accumulator<typename V::Mma::Atom::LayoutC_TV>(kDim / 2) &&
         lies_as_accumulator<typename V::Mma::Atom::LayoutA_TV>(8);
}
static_assert(lies_as_expected<BFloat16, 128, 64>() && lies_as_expected<Half, 64, 128>());

// Starts c (+)= a b. Called by the 128 threads of a warpgroup.
template <bool kAdd, class Mma, class A, class B, class C>
__device__ inline void begin_product(Mma& mma, const A& a, const B& b, C& c) {
  cute::warpgroup_fence_operand(c);
  cute::warpgroup_arrive();
  mma.accumulate_ = kAdd ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), c);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
}

// Waits until at most kUnderWay products are unfinished, the most recent ones. sums: the accumulators of the finished
// ones, which may be used from here on. What those products have read may be overwritten.
template <int kUnderWay, class... Sums>
__device__ inline void wait_products(Sums&... sums) {
  cute::warpgroup_wait<kUnderWay>();
  const auto settle = [](auto& x) {
    CUTE_UNROLL
    for (auto& sum : x) cute::warpgroup_fence_operand(sum);
  };
  (settle(sums), ...);
}

template <class Layout, class T>
__device__ inline auto in_shared(const T* data) {
  return cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<const Element<T>*>(data)), Layout{});
}

// Starts x = q k^T, with [kRows, kDim] and [kKeys, kDim].
template <class T, int kDim, int kKeys>
__device__ inline void begin_keys(float (&x)[kKeys / 2], const T* q, const T* k) {
  using Of = Logits<T, kDim, kKeys>;
  typename Of::Mma mma;
  const auto slice = mma.get_slice(threadIdx.x % 128);
  cute::Tensor c = cute::make_tensor(cute::make_rmem_ptr(x),
                                     cute::partition_fragment_C(mma, Shape<Int<kRows>, Int<kKeys>>{}).layout());
  begin_product<false>(mma, slice.partition_fragment_A(in_shared<typename Of::Q>(q)),
                       slice.partition_fragment_B(in_shared<typename Of::K>(k)), c);
}

// Weights [kRows, kKeys] as tensor-core operands: the thread's own, rounded to T.
template <class T, int kKeys>
struct Weights {
  uint32_t pairs[kKeys / 4];

  __device__ void round(const float (&x)[kKeys / 2]) {
    CUTE_UNROLL
    for (int i = 0; i < kKeys / 4; ++i) {
      if constexpr (std::is_same_v<T, Half>) {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        pairs[i] = reinterpret_cast<const uint32_t&>(pair);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        pairs[i] = reinterpret_cast<const uint32_t&>(pair);
      }
    }
  }
};

// Starts o += weights v, with [kRows, kKeys] and [kKeys, kDim].
template <class T, int kDim, int kKeys>
__device__ inline void begin_values(float (&o)[kDim / 2], Weights<T, kKeys>& weights, const T* v) {
  using Of = Values<T, kDim, kKeys>;
  typename Of::Mma mma;
  const auto slice = mma.get_slice(threadIdx.x % 128);
  cute::Tensor a =
      cute::make_tensor(cute::make_rmem_ptr(reinterpret_cast<Element<T>*>(weights.pairs)), typename Of::Weights{});
  cute::Tensor c = cute::make_tensor(cute::make_rmem_ptr(o),
                                     cute::partition_fragment_C(mma, Shape<Int<kRows>, Int<kDim>>{}).layout());
  cute::warpgroup_fence_operand(a);
  begin_product<true>(mma, a, slice.partition_fragment_B(in_shared<typename Of::V>(v)), c);
}

// A product that is waited for immediately.
template <class T, int kDim, int kKeys>
__device__ inline void multiply_keys(float (&x)[kKeys / 2], const T* q, const T* k) {
  begin_keys<T, kDim, kKeys>(x, q, k);
  wait_products<0>(x);
}

// Sets the number of registers per thread of a warpgroup from here on: fewer, or more once others have released theirs.
template <int kRegisters>
__device__ inline void give_registers() {
  cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}
template <int kRegisters>
__device__ inline void take_registers() {
  cutlass::arch::warpgroup_reg_alloc<kRegisters>();
}

// Barrier `id` for `threads` threads: meet() arrives and waits, come_by() arrives without waiting.
__device__ inline void meet(int threads, int id) {
  cutlass::arch::NamedBarrier::sync(threads, id);
}
__device__ inline void come_by(int threads, int id) {
  cutlass::arch::NamedBarrier::arrive(threads, id);
}

// Makes this thread's stores to shared memory visible to wgmma and TMA, for threads that a later barrier synchronizes.
__device__ inline void fence_stores() {
  cutlass::arch::fence_view_async_shared();
}
__device__ inline void share_stores(int threads, int id) {
  fence_stores();
  meet(threads, id);
}

// An mbarrier. Its phase ends when this many threads have arrived, and all bytes that one of them has announced.
__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  ClusterBarrier::init(barrier, arrivals);
}
// Call after the last barrier_init(), from the same thread; a __syncthreads() must follow.
__device__ inline void barriers_made() {
  cutlass::arch::fence_barrier_init();
}
__device__ inline void barrier_arrive(uint64_t* barrier) {
  ClusterBarrier::arrive(barrier);
}
__device__ inline void barrier_announce(uint64_t* barrier, int bytes) {  // also arrives
  ClusterTransactionBarrier::arrive_and_expect_tx(barrier, bytes);
}
// Waits for the end of an even (0) or odd (1) phase.
__device__ inline void barrier_wait(uint64_t* barrier, unsigned phase) {
  ClusterBarrier::wait(barrier, phase);
}

using TensorMap = CUtensorMap;

// A map of K or V, [b, heads, n, d], for copies in boxes of one slab of `keys` rows. False if TMA cannot address it.
template <class T>
inline bool tensor_map(TensorMap& map, const KVView& x, int64_t b, int64_t heads, int64_t n, int keys) {
  uint64_t strides[3];
  if (!copy_strides(strides, x, b, heads, n)) return false;
  const uint64_t sizes[] = {static_cast<uint64_t>(x.row_bytes) / sizeof(T), static_cast<uint64_t>(n),
                            static_cast<uint64_t>(heads), static_cast<uint64_t>(b)};
  const uint32_t box[] = {kSlab, static_cast<uint32_t>(keys), 1, 1}, steps[] = {1, 1, 1, 1};
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
             &map, cute::TMA::to_CUtensorMapDataType<Element<T>>(), 4u, static_cast<void*>(x.data), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Starts copying a box at (column, key, head, batch). Keys past the end of the tensor arrive as zeros. One thread calls
// this. The barrier receives the bytes of the whole box.
template <class T>
__device__ inline void copy_box(const TensorMap& map, uint64_t* barrier, T* to, int column, int key, int head,
                                int batch) {
  cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), to, column,
                               key, head, batch);
}

// Dynamic shared memory, aligned to 1024 bytes.
__device__ inline unsigned char* aligned_shared() {
  extern __shared__ __align__(1024) unsigned char sm90_shared_bytes[];
  return sm90_shared_bytes + (-cute::cast_smem_ptr_to_uint(sm90_shared_bytes) & 1023u);
}

// Whether the current device runs code compiled for sm_90a.
inline bool is_hopper() {
  int device, major, minor;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

}  // namespace
}  // namespace kvops::sm90
#else
#include "cudasim_sm90.h"
#endif
