// Kernels with known traffic, for test_traffic.py, which checks the counts of cudasim_traffic.cpp.
#include "cudasim.h"

using cudasim::guarded, cudasim::start_kernel;

namespace {
__global__ void copy(const float* from, float* to) {  // coalesced
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  to[i] = from[i];
}
__global__ void copy_pieces(const uint4* from, uint4* to) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  to[i] = __ldg(from + i);
}
__global__ void strided(const float* from, float* to, int step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  to[i] = from[i * step];
}
__global__ void guarded_tail(const float* from, float* to, int n) {  // the last lanes leave early
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  to[i] = from[i];
}
// Each lane reads the word (or the 16 bytes) `step` after its neighbour's; 0: all read the same.
__global__ void bank_words(float* to, int step) {
  DYNAMIC_SHARED(float, x);
  to[threadIdx.x] = x[threadIdx.x * step];
}
__global__ void bank_pieces(uint4* to, int step) {
  DYNAMIC_SHARED(uint4, x);
  to[threadIdx.x] = x[threadIdx.x * step];
}
__global__ void bank_matrices(unsigned* to, int step) {
  DYNAMIC_SHARED(uint4, x);
  unsigned y[4];
  cudasim::ldmatrix_x4(y, x + threadIdx.x * step, false);
  to[threadIdx.x] = y[0];
}
__global__ void count_in_one(unsigned* to) {  // all lanes on one word, then each on its own
  __shared__ unsigned x[32];
  x[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&x[0], 1u);
  atomicAdd(&x[threadIdx.x], 1u);
  __syncthreads();
  atomicAdd(to, x[threadIdx.x]);
}
__global__ void read_twice(const float* from, float* to, int n) {  // by all blocks, repeatedly
  float sum = 0;
  for (int turn = 0; turn < 2; ++turn)
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += __ldcg(from + i);
  to[threadIdx.x] = sum;
}
__global__ void read_twice_by_l1(const float* from, float* to, int n) {
  float sum = 0;
  for (int turn = 0; turn < 2; ++turn)
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += from[i];
  to[threadIdx.x] = sum;
}
__global__ void fetch(const uint4* from, uint4* to) {  // bypassing registers
  DYNAMIC_SHARED(uint4, x);
  cudasim::copy_async(x + threadIdx.x, from + threadIdx.x, 16);
  cudasim::copy_async_commit();
  cudasim::copy_async_wait(0);
  to[threadIdx.x] = x[threadIdx.x];
}
__global__ void local(float* to) {  // a thread's own array is no traffic
  float x[16];
  for (int i = 0; i < 16; ++i) x[(i * 7 + threadIdx.x) % 16] = i;
  __syncwarp();
  to[threadIdx.x] = x[threadIdx.x % 16];
}
}  // namespace

extern "C" {
#define RUN(name, grid, block, bytes, ...) \
  return guarded([&] { start_kernel<name>(1, grid, block, bytes, nullptr, __VA_ARGS__); })
const char* run_copy(float* x, float* y) { RUN(copy, 8, 128, 0, x, y); }
const char* run_copy_pieces(uint4* x, uint4* y) { RUN(copy_pieces, 8, 128, 0, x, y); }
const char* run_strided(float* x, float* y, int step) { RUN(strided, 2, 64, 0, x, y, step); }
const char* run_guarded_tail(float* x, float* y, int n) { RUN(guarded_tail, 2, 64, 0, x, y, n); }
const char* run_bank_words(float*, float* y, int step) { RUN(bank_words, 1, 32, 8192, y, step); }
const char* run_bank_pieces(float*, uint4* y, int step) { RUN(bank_pieces, 1, 32, 8192, y, step); }
const char* run_bank_matrices(float*, unsigned* y, int step) { RUN(bank_matrices, 1, 32, 8192, y, step); }
const char* run_count_in_one(float*, unsigned* y) { RUN(count_in_one, 1, 32, 0, y); }
const char* run_read_twice(float* x, float* y, int n) { RUN(read_twice, 1, 32, 0, x, y, n); }
const char* run_read_twice_by_l1(float* x, float* y, int n) { RUN(read_twice_by_l1, 1, 32, 0, x, y, n); }
const char* run_fetch(uint4* x, uint4* y) { RUN(fetch, 1, 64, 1024, x, y); }
const char* run_local(float*, float* y) { RUN(local, 1, 64, 0, y); }
}
