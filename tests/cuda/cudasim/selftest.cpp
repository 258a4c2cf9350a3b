// Kernels with one fault each, and sound ones, for test_cudasim.py. BROKEN leaves out what some of them need.
#include "cudasim.h"

using cudasim::guarded, cudasim::start_kernel;

namespace {
__global__ void barrier_in_branch(float* x) {
  if (threadIdx.x < 40) __syncthreads();
  x[threadIdx.x] = 1;
}
__global__ void two_barriers(float* x) {
  if (threadIdx.x % 2) {
    x[0] = 1;
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void lane_outside_mask(int* x) { x[threadIdx.x] = __shfl_sync(0xffffu, int(threadIdx.x), 0); }
__global__ void early_return(int* x, int n) {
  if (int(threadIdx.x) >= n) return;
  x[threadIdx.x] = __shfl_xor_sync(~0u, int(threadIdx.x), 1);
}
__global__ void partial_warp(int* x) { x[threadIdx.x] = __shfl_xor_sync(~0u, int(threadIdx.x), 16); }
__global__ void half_warps(int* x) {  // sound: disjoint masks meet separately
  const int lane = threadIdx.x % 32;
  x[threadIdx.x] = lane < 16 ? __shfl_sync(0xffffu, lane, 3) : __shfl_sync(0xffff0000u, lane, 20);
}
__global__ void broadcast(int* x) {  // correct only if thread 0 runs first
  __shared__ int value;
  if (threadIdx.x == 0) value = 7;
#ifndef BROKEN
  __syncthreads();
#endif
  x[threadIdx.x] = value;
}
__global__ void uninitialised(int* x) {
  __shared__ int count;
  atomicAdd(&count, 1);
  __syncthreads();
  x[threadIdx.x] = count;
}
__global__ void warp_synchronous(int* x) {  // relies on lanes running in lockstep
  __shared__ int v[32];
  v[threadIdx.x] = threadIdx.x;
#ifndef BROKEN
  __syncwarp();
#endif
  x[threadIdx.x] = v[31 - threadIdx.x];
}
__global__ void static_overrun(float* x, int i) {
  __shared__ float v[8];
  float* p = v;
  p[i] = 1;
  x[0] = p[0];
}
__global__ void dynamic_overrun(float* x, int i) {
  DYNAMIC_SHARED(float, v);
  v[i] = 1;
  x[0] = v[0];
}
__global__ void misaligned(float* x, int i) { x[0] = reinterpret_cast<const float4*>(x + i)->x; }
__global__ void last_block(int* x) {  // sound: the last block to finish sums up
  unsigned* counter = reinterpret_cast<unsigned*>(x + 8);
  __shared__ bool last;
  if (threadIdx.x == blockIdx.x) x[blockIdx.x] = blockIdx.x + 1;
#ifndef BROKEN
  __threadfence();
#endif
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x == 32) {
    __threadfence();
    int total = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) total += __ldcg(x + i);
    x[9] = total;
  }
}
__global__ void collectives(int* x) {
  const int t = threadIdx.x, lane = t % 32;
  int ok = __ballot_sync(~0u, lane % 3 == 0) == 0x49249249u;
  ok &= __any_sync(~0u, lane == 5) && !__all_sync(~0u, lane == 5) && __all_sync(~0u, lane < 32);
  ok &= __shfl_up_sync(~0u, lane, 4) == (lane < 4 ? lane : lane - 4);
  ok &= __shfl_down_sync(~0u, lane, 4, 8) == (lane % 8 < 4 ? lane + 4 : lane);
  ok &= __shfl_sync(~0u, lane, 9, 8) == lane / 8 * 8 + 1;
  ok &= __shfl_xor_sync(~0u, double(lane), 1) == (lane ^ 1);
  ok &= __reduce_add_sync(~0u, unsigned(lane)) == 496 && __reduce_max_sync(~0u, lane) == 31;
  ok &= __popc(__match_any_sync(~0u, lane / 4)) == 4;
  ok &= __syncthreads_count(t < 10) == 10 && __syncthreads_or(t == 63) && !__syncthreads_and(t < 63);
  ok &= __bfloat162float(__shfl_sync(~0u, __float2bfloat16(float(lane)), 2)) == 2;
  ok &= max(3, 5u) == 5u && min(-1.0f, 2) == -1.0f && __clz(1) == 31 && __ffs(8) == 4 && __brev(1) == 0x80000000u;
  float sine, cosine;
  sincospif(-0.5f, &sine, &cosine);
  ok &= sine == -1.0f && fabsf(cosine) < 1e-7f && __double2ll_rn(-2.5) == -2;
  if (t % 2 == int(blockIdx.x)) x[t] = ok;
}
__global__ void async_copies(int* x) {
  __shared__ __align__(16) int v[2][4];
  for (int i = 0; i < 2; ++i) {
    v[i][3] = 5;
    cudasim::copy_async(v[i], x + 4 * i, 16);
    cudasim::copy_async_commit();
  }
  cudasim::copy_async_wait(1);
  x[8] = v[0][3];
#ifndef BROKEN
  cudasim::copy_async_wait(0);
#endif
  x[9] = v[1][3];
}
// x[lane]: whether one product of small integers is correct for each lane, with A [16, 16] by ldmatrix, and B [8, 16]
// by ldmatrix or B [16, 8] by its transposed form.
template <int kType, int kTransposed>
__global__ void tensor_cores(int* x) {
  const int lane = threadIdx.x, r = lane / 4, c = lane % 4 * 2;
  __shared__ __align__(16) unsigned short A[16][16], B[16][16];
  const auto a = [](int i, int k) { return (3 * i + 5 * k) % 7 - 3; };
  const auto b = [](int k, int j) { return (2 * k + 3 * j) % 5 - 2; };
  const auto stored = [](int value) -> unsigned short {
    return kType ? __bfloat16_as_ushort(__float2bfloat16(float(value))) : __half_as_ushort(__float2half(float(value)));
  };
  for (int i = lane; i < 256; i += 32) {
    A[i / 16][i % 16] = stored(a(i / 16, i % 16));
    const int k = kTransposed ? i / 16 : i % 16, j = kTransposed ? i % 16 : i / 16;
    if (j < 8) B[i / 16][i % 16] = stored(b(k, j));
  }
  __syncwarp();
  unsigned p[4], q[4];
  cudasim::ldmatrix_x4(p, &A[lane % 16][lane / 16 * 8], false);
  cudasim::ldmatrix_x4(q, kTransposed ? &B[lane % 16][0] : &B[lane % 8][lane / 8 % 2 * 8], kTransposed);
  unsigned t[4];
  cudasim::ldmatrix_x4(t, &B[lane % 16][0], false);
  const unsigned transposed = cudasim::movmatrix_trans(t[0]);
  float d[4] = {1, 2, 3, 4};
  cudasim::mma_m16n8k16(kType ? "bf16" : "f16", d, {p[0], p[1], p[2], p[3]}, {q[0], q[1]});
  int ok = !kTransposed || transposed == q[0];
  for (int e = 0; e < 4; ++e) {
    int right = e + 1;
    for (int k = 0; k < 16; ++k) right += a(r + e / 2 * 8, k) * b(k, c + e % 2);
    ok &= d[e] == float(right);
  }
  x[lane] = ok;
}
// The same with operands of tf32, whose remaining bits must not count.
__global__ void tf32_cores(int* x) {
  const int lane = threadIdx.x, r = lane / 4, c = lane % 4;
  const auto a = [](int i, int k) { return (3 * i + 5 * k) % 7 - 3; };
  const auto b = [](int k, int j) { return (2 * k + 3 * j) % 5 - 2; };
  const auto stored = [](int value) { return __uint_as_float(__float_as_uint(float(value)) | 0x1fff); };
  float d[4] = {1, 2, 3, 4};
  cudasim::mma_m16n8k8_tf32(d, {stored(a(r, c)), stored(a(r + 8, c)), stored(a(r, c + 4)), stored(a(r + 8, c + 4))},
                            {stored(b(c, r)), stored(b(c + 4, r))});
  int ok = 1;
  for (int e = 0; e < 4; ++e) {
    int right = e + 1;
    for (int k = 0; k < 8; ++k) right += a(r + e / 2 * 8, k) * b(k, 2 * c + e % 2);
    ok &= d[e] == float(right);
  }
  x[lane] = ok;
}
__global__ void half_a_tensor_core(int* x) {
  float d[4] = {};
  cudasim::mma_m16n8k16("f16", d, {}, {});
  x[threadIdx.x] = 1;
}
__global__ void unaligned_matrix(int* x) {
  __shared__ __align__(16) unsigned short A[32][12];
  cudasim::ldmatrix_x4(reinterpret_cast<unsigned (&)[4]>(x[4 * threadIdx.x]), A[threadIdx.x], false);
}
__global__ void matrix_of_others(int* x) {  // each lane's row is written by another lane
  __shared__ __align__(16) unsigned A[32][4];
  for (int i = 0; i < 4; ++i) A[31 - threadIdx.x][i] = 31 - threadIdx.x;
#ifndef BROKEN
  __syncwarp();
#endif
  unsigned y[4];
  cudasim::ldmatrix_x4(y, A[threadIdx.x], false);
  x[threadIdx.x] = y[0] == threadIdx.x / 4;
}
__global__ void shared_memory(int* x) {
  __shared__ int v[50];
  v[threadIdx.x] = int(threadIdx.x);
  __syncthreads();
  x[threadIdx.x] = v[49 - threadIdx.x];
}
__global__ void other_shared_memory(int* x) { shared_memory(x); }

// Each block of a cluster has one number in dynamic shared memory and one in a __shared__ variable, and adds up the
// first numbers of all blocks.
template <int kFault>
__global__ void cluster(int* x) {
  DYNAMIC_SHARED(int, number);
  __shared__ int own[32];
  const unsigned t = threadIdx.x, rank = cudasim::cluster_rank();
  own[t] = int(blockIdx.x);
  if (t == 0) number[1] = int(blockIdx.x);
  if (kFault == 1 && rank == 2) return;
  if (kFault != 2) cudasim::cluster_sync();
  if (kFault == 3 && rank == 0) return;
  int sum = 0;
  if (kFault == 4) sum = *static_cast<int*>(cudasim::of_block(number, rank + 3));
  if (kFault == 5) sum = *static_cast<int*>(cudasim::of_block(own, 1));
  for (unsigned r = 0; r < 4; ++r) sum += static_cast<int*>(cudasim::of_block(number, r))[1];
  if (kFault == 6 && rank == 0) cudasim::cluster_sync();
  if (kFault != 7) cudasim::cluster_sync();
  if (t == 0) x[blockIdx.x] = sum == int(16 * (blockIdx.x / 4) + 6) && own[31] == int(blockIdx.x);
}
// Each block but the first adds to the number of the block before, once that is available.
template <int kFault>
__global__ void chain(unsigned* x) {  // x: a number per block, then their flags, then the ticket counter
  __shared__ unsigned block;
  unsigned* const flags = x + gridDim.x;
  if (threadIdx.x == 0) block = kFault == 1 ? gridDim.x - 1 - blockIdx.x : atomicAdd(x + 2 * gridDim.x, 1u);
  __syncthreads();
  if (threadIdx.x == 5 && block) {
    if (kFault == 4) {
      while (!atomicAdd(flags + block - 1, 0u));
    } else if (kFault < 5) {
      while (!cudasim::load_acquire(flags + block - 1));
    }
  }
  if (kFault >= 5 && block)
    while (!__syncthreads_or(threadIdx.x == 5 && cudasim::load_acquire(flags + block - 1)));
  if (threadIdx.x == 5) x[block] = block ? x[block - 1] + 1 : 1;
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (kFault == 2)
    atomicExch(flags + block, 1u);
  else if (kFault != 3 && kFault != 6)
    cudasim::store_release(flags + block, 1);
}
__global__ void long_chain(unsigned* x) {  // x[0]: its length; x[1]: the most blocks that have been there at once
  if (threadIdx.x) return;
  atomicMax(x + 1, atomicAdd(x + 2, 1u) + 1);
  const unsigned ticket = atomicAdd(x + 3, 1u);
  while (cudasim::load_acquire(x) != ticket);
  for (int i = 0; i < 50; ++i) __threadfence();  // others poll meanwhile
  atomicSub(x + 2, 1u);
  cudasim::store_release(x, ticket + 1);
}
__global__ void late_warps(unsigned* x) {  // x[0]: warps that begin long after their neighbour; then a flag per block
  if (threadIdx.x == 32) atomicExch(x + 1 + blockIdx.x, 1u);
  if (threadIdx.x) return;
  for (int i = 0; i < 200; ++i) __threadfence();
  if (!atomicAdd(x + 1 + blockIdx.x, 0u)) atomicAdd(x, 1u);
}
// The last block adds up what all have stored: 0 and 1 are sound.
template <int kFault>
__global__ void sum_of_blocks(int* x) {  // x: a number per block, the counter, the sum
  __shared__ bool last;
  for (int i = 0; i < 4; ++i) __syncthreads();  // work that takes some time
  if (threadIdx.x == 0) {
    x[blockIdx.x] = int(blockIdx.x) + 1;
    if (kFault != 2) __threadfence();
    last = atomicAdd(x + gridDim.x, 1) == int(gridDim.x) - 1;
  }
  for (int i = 0; i < 4; ++i) __syncthreads();
  if (!last || threadIdx.x != 32) return;
  if (kFault != 3) __threadfence();
  int sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += kFault == 1 || kFault == 3 ? x[i] : __ldcg(x + i);
  x[gridDim.x + 1] = sum;
}
__global__ void own_stores(int* x) {  // a block sees its own stores, and so do all later readers
  x[blockIdx.x * 32 + threadIdx.x] = int(threadIdx.x);
  __syncthreads();
  const int other = x[blockIdx.x * 32 + (threadIdx.x ^ 1)];
  __syncthreads();
  x[blockIdx.x * 32 + threadIdx.x] = other;
}
__global__ void meets_others(unsigned* x) {  // depends on the seed: do other blocks run between this one's atomics?
  const unsigned ticket = atomicAdd(x, 1u);
  for (int i = 0; i < 20; ++i) __threadfence();
  if (atomicAdd(x, 1u) != ticket + 1) x[1] = 1;
}
}  // namespace

extern "C" {
#define RUN(name, grid, block, bytes, ...) \
  return guarded([&] { start_kernel<name>(1, grid, block, bytes, nullptr, __VA_ARGS__); })
const char* run_barrier_in_branch(float* x) { RUN(barrier_in_branch, 1, 64, 0, x); }
const char* run_two_barriers(float* x) { RUN(two_barriers, 1, 64, 0, x); }
const char* run_lane_outside_mask(int* x) { RUN(lane_outside_mask, 1, 32, 0, x); }
const char* run_early_return(int* x, int n) { RUN(early_return, 1, 64, 0, x, n); }
const char* run_partial_warp(int* x) { RUN(partial_warp, 1, 40, 0, x); }
const char* run_half_warps(int* x) { RUN(half_warps, 1, 64, 0, x); }
const char* run_broadcast(int* x) { RUN(broadcast, 1, 64, 0, x); }
const char* run_uninitialised(int* x) { RUN(uninitialised, 1, 64, 0, x); }
const char* run_warp_synchronous(int* x) { RUN(warp_synchronous, 1, 32, 0, x); }
const char* run_static_overrun(float* x, int i) { RUN(static_overrun, 1, 1, 0, x, i); }
const char* run_dynamic_overrun(float* x, int i) { RUN(dynamic_overrun, 1, 1, 32, x, i); }
const char* run_misaligned(float* x, int i) { RUN(misaligned, 1, 1, 0, x, i); }
const char* run_last_block(int* x) {
  x[8] = 0;
  RUN(last_block, 8, 64, 0, x);
}
const char* run_collectives(int* x) { RUN(collectives, 2, 64, 0, x); }
const char* run_async_copies(int* x) {
  for (int i = 0; i < 8; ++i) x[i] = i;
  RUN(async_copies, 1, 1, 0, x);
}
const char* run_tensor_cores(int* x, int type, int transposed) {
  if (type && transposed) RUN((tensor_cores<1, 1>), 1, 32, 0, x);
  if (type) RUN((tensor_cores<1, 0>), 1, 32, 0, x);
  if (transposed) RUN((tensor_cores<0, 1>), 1, 32, 0, x);
  RUN((tensor_cores<0, 0>), 1, 32, 0, x);
}
const char* run_tf32_cores(int* x) { RUN(tf32_cores, 1, 32, 0, x); }
const char* run_half_a_tensor_core(int* x) { RUN(half_a_tensor_core, 1, 16, 0, x); }
const char* run_unaligned_matrix(int* x) { RUN(unaligned_matrix, 1, 16, 0, x); }
const char* run_matrix_of_others(int* x) { RUN(matrix_of_others, 1, 32, 0, x); }
const char* run_shared_memory(int* x, int dynamic_bytes, int allowed) {
  cudasim::allow_dynamic_shared_memory<shared_memory>(allowed);
  RUN(shared_memory, 1, 50, dynamic_bytes, x);
}
const char* run_static_shared_memory(int* x) {
  x[0] = int(cudasim::static_shared_memory<other_shared_memory>());
  return guarded([&] {
    start_kernel<other_shared_memory>(1, 1, 50, 0, nullptr, x + 2);
    x[1] = int(cudasim::static_shared_memory<other_shared_memory>());
  });
}
const char* run_device(int* x) {
  return guarded([&] {
    const auto& device = cudasim::device();
    x[0] = device.multiprocessors, x[1] = int(device.shared_memory), x[2] = int(device.l2), x[3] = device.clusters;
  });
}
const char* run_cluster(int* x, int fault) {
  const auto run = [&](auto kernel) {
    return guarded([&] { start_kernel<cluster<kernel()>>(4, 8, 32, 8, nullptr, x); });
  };
  using std::integral_constant;
  return fault == 0   ? run(integral_constant<int, 0>())
         : fault == 1 ? run(integral_constant<int, 1>())
         : fault == 2 ? run(integral_constant<int, 2>())
         : fault == 3 ? run(integral_constant<int, 3>())
         : fault == 4 ? run(integral_constant<int, 4>())
         : fault == 5 ? run(integral_constant<int, 5>())
         : fault == 6 ? run(integral_constant<int, 6>())
                      : run(integral_constant<int, 7>());
}
const char* run_odd_cluster(int* x) {
  return guarded([&] { start_kernel<cluster<0>>(4, 6, 32, 8, nullptr, x); });
}
const char* run_chain(unsigned* x, int fault) {
  std::fill(x, x + 17, 0);
  if (fault == 1) RUN(chain<1>, 8, 32, 0, x);
  if (fault == 2) RUN(chain<2>, 8, 32, 0, x);
  if (fault == 4) RUN(chain<4>, 8, 32, 0, x);
  if (fault == 3) RUN(chain<3>, 8, 32, 0, x);
  if (fault == 5) RUN(chain<5>, 8, 32, 0, x);  // sound: barriers in the loop that waits
  if (fault == 6) RUN(chain<6>, 8, 32, 0, x);
  RUN(chain<0>, 8, 32, 0, x);
}
const char* run_long_chain(unsigned* x) {
  std::fill(x, x + 4, 0);
  RUN(long_chain, 100, 64, 0, x);
}
const char* run_late_warps(unsigned* x) {
  std::fill(x, x + 51, 0);
  RUN(late_warps, 50, 64, 0, x);
}
const char* run_sum_of_blocks(int* x, int fault) {
  std::fill(x, x + 10, 0);
  if (fault == 1) RUN(sum_of_blocks<1>, 8, 64, 0, x);
  if (fault == 2) RUN(sum_of_blocks<2>, 8, 64, 0, x);
  if (fault == 3) RUN(sum_of_blocks<3>, 8, 64, 0, x);
  RUN(sum_of_blocks<0>, 8, 64, 0, x);
}
const char* run_own_stores(int* x) { RUN(own_stores, 2, 32, 0, x); }
const char* run_meets_others(unsigned* x) {
  x[0] = x[1] = 0;
  RUN(meets_others, 8, 1, 0, x);
}
const char* run_empty_block(int* x) { RUN(collectives, 1, 0, 0, x); }
const char* run_big_block(int* x) { RUN(collectives, 1, 1056, 0, x); }
}
