// assign_prototypes: the prototype with the highest cosine for each key.
//
//   assignment[i] = argmax over c of k_i . p_c / |p_c|        (the norm of k_i does not matter)
//
// Bytes that must move: K once; the [n, C] products are never written. With 8 heads of 131072 keys, d = 128 and 500
// prototypes, the products are 134 GFLOP: 170 us on an H200 at the rate of wgmma, while reading K takes 62 us. mma.sync
// reaches about 60 % of that rate.
//
// pack_prototypes converts prototypes to unit vectors with 16-bit elements: fp16 for fp16 keys, bf16 for bf16 and fp32
// keys (fp32 keys are rounded to bf16 as they are loaded). A prototype that cannot win (zero or not finite) becomes
// zero.
//
// assign_prototypes multiplies keys with prototypes as window_scores multiplies them with queries (window.cuh). A block
// keeps its head's prototypes in shared memory, all of them if they fit (up to 700 with d = 128 on an H200), otherwise
// chunk after chunk. Its warps go over the block's keys, 32 or 16 at a time in registers, independently and without a
// barrier. A lane has four keys, and for every 16 prototypes four of each key's products. It keeps the largest product
// and its index, at three instructions per product. At the end, the four lanes that share a key compare their results.
// Ascending order and strict comparisons break ties towards the lower index; prototypes of equal direction have equal
// products.
//
// If a key's best product is not positive and in the safe range, the whole warp redoes the key in double. This covers
// keys that are zero, tiny, huge or not finite, and those that point away from all prototypes. So a zero prototype
// never wins through its product.
//
// Grid: x runs over (batch, head, split); no result depends on the splits.
#pragma once
#include "../ops/assign_prototypes.h"
#include "async.cuh"
#include "prototypes.cuh"
#include "reduce.cuh"
#include "sm90/hopper.h"
#include "window.cuh"

namespace kvops {
namespace {

constexpr int kAssignThreads = 384, kAssignWarps = kAssignThreads / 32;

// The operand type for keys of T.
template <class T>
using Product = std::conditional_t<sizeof(T) == 4, BFloat16, Value<T>>;

// The prototypes of a head as 16-bit unit vectors, and how a block loads them.
struct PackedPrototypes {
  int64_t rows;   // per head: C, padded to a multiple of 16
  int row_bytes;  // a multiple of 64
  int pitch;      // bytes between rows in shared memory: 64 more than a multiple of 128, see window.cuh
  int chunk;      // rows that a block holds at a time, a multiple of 16
  int64_t bytes;  // of all heads
  bool carry;     // more than one chunk

  static PackedPrototypes of(const AssignPrototypesParams& p) {
    PackedPrototypes x;
    x.rows = (p.count + kTileRows - 1) / kTileRows * kTileRows;
    x.row_bytes = static_cast<int>((2 * p.d + 63) / 64 * 64);
    x.pitch = x.row_bytes % 128 ? x.row_bytes : x.row_bytes + 64;
    const int64_t most = (shared_memory() - 1024) / x.pitch / kTileRows * kTileRows;
    const int64_t chunks = (x.rows + most - 1) / most;  // of about equal size
    x.chunk = static_cast<int>((x.rows / kTileRows + chunks - 1) / chunks * kTileRows);
    x.bytes = p.b * p.heads * x.rows * x.row_bytes;
    x.carry = chunks > 1;
    return x;
  }

  KVView view(const AssignPrototypesParams& p, char* memory) const {
    return {memory, p.heads * rows * row_bytes, rows * row_bytes, row_bytes, row_bytes};
  }
};

// One warp per prototype.
template <class E>
__global__ void __launch_bounds__(256)
    pack_prototypes_kernel(AssignPrototypesParams p, PackedPrototypes packed, char* memory) {
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  if (row >= p.b * p.heads * packed.rows) return;
  const int64_t head = row / packed.rows, c = row % packed.rows;
  const float* const prototype = p.prototypes + (head * p.count + c) * p.d;
  const int lane = threadIdx.x % 32, d = c < p.count ? static_cast<int>(p.d) : 0;
  double squares = 0;
  for (int i = lane; i < d; i += 32) squares += static_cast<double>(prototype[i]) * prototype[i];
  squares = lanes_sum<32>(squares);
  const bool usable = 0 < squares && squares < CUDART_INF;
  const double scale = usable ? 1 / sqrt(squares) : 0.0;
  E* const unit = reinterpret_cast<E*>(memory + row * packed.row_bytes);
  for (int i = lane; i < packed.row_bytes / 2; i += 32)
    unit[i] = from_float<E>(usable && i < d ? static_cast<float>(prototype[i] * scale) : 0.0f);
}

// A warp's keys as product operands. Two pieces of fp32 make one.
template <class T, int kPieces>
struct AssignKeys : KeyTile<std::conditional_t<sizeof(T) == 4, BFloat16, T>, kPieces> {
  using Base = KeyTile<std::conditional_t<sizeof(T) == 4, BFloat16, T>, kPieces>;

  __device__ void load(const HeadRows& rows, int left, int pieces, int part, bool wide) {
    if constexpr (sizeof(T) < 4) {
      Base::load(rows, left, pieces, part, wide);
    } else if (wide) {
      convert<true>(rows, left, pieces, part);
    } else {
      convert<false>(rows, left, pieces, part);
    }
  }

  template <bool kWide>
  __device__ void convert(const HeadRows& rows, int left, int pieces, int part) {
    const int key = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < Base::kOwn; ++i) {
      const char* const row = rows.row(key + 8 * i, key + 8 * i < left);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (p % 4 == 0) __syncwarp();  // limits the loads in flight: all at once would take all registers
        const int piece = 2 * (part * 4 * kPieces + 4 * p + static_cast<int>(threadIdx.x % 4));
        const char* const at = row + 16 * piece;
        unsigned word[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (key + 8 * i >= left || piece + half >= pieces) continue;
          float x[4];
          unpack<float>(load_piece<float, kWide>(at + 16 * half), x);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            word[2 * half + e / 2] |= static_cast<unsigned>(from_float<BFloat16>(x[e]).bits) << e % 2 * 16;
        }
        this->raw[i][p] = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
};

template <class T, int kPieces, bool kPaged>
__global__ void __launch_bounds__(kAssignThreads, 1)
    assign_prototypes_kernel(AssignPrototypesParams p, PackedPrototypes packed, const char* memory, float* carry,
                             Splits splits, bool wide) {
  using Keys = AssignKeys<T, kPieces>;
  constexpr int kOwn = Keys::kOwn, kBlocks = Keys::kBlocks;
  DYNAMIC_SHARED(char, units);  // [chunk, pitch]
  const int64_t head = blockIdx.x / splits.count, split = blockIdx.x % splits.count;
  const int64_t b = head / p.heads, h = head % p.heads;
  const int begin = static_cast<int>(split * splits.keys), end = static_cast<int>(min(begin + splits.keys, p.n));
  const int first = static_cast<int>(p.slots.first(b)), last = first + static_cast<int>(p.slots.count(b));
  const int lane = threadIdx.x % 32, pieces = static_cast<int>(p.k.row_bytes / 16);
  const int parts = (packed.row_bytes / 64 + kPieces - 1) / kPieces;
  const HeadRows rows = head_rows<kPaged, T>(p.k, b, h);
  int* const assignment = p.assignment + head * p.n;
  if (carry) carry += head * p.n;

  for (int from = 0; from < packed.rows; from += packed.chunk) {
    const int count = static_cast<int>(min(int64_t{packed.chunk}, packed.rows - from));
    const int of_row = packed.row_bytes / 16;
    __syncthreads();  // the previous chunk is done
    for (int i = threadIdx.x; i < count * of_row; i += kAssignThreads)
      copy_async(reinterpret_cast<uint4*>(units + i / of_row * packed.pitch) + i % of_row,
                 memory + (head * packed.rows + from) * packed.row_bytes + int64_t{16} * i);
    end_copies();
    wait_for_copies<0>();
    __syncthreads();  // the prototypes are loaded

    const bool is_first = from == 0, is_last = from + count >= packed.rows;
#pragma unroll 1
    for (int key = begin + threadIdx.x / 32 * Keys::kKeys; key < end; key += kAssignWarps * Keys::kKeys) {
      const int left = min(end, last) - key;
      const HeadRows own = rows.from(key);
      Keys keys;
      if (parts == 1) keys.load(own, left, pieces, 0, wide);
      Best best[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) best[i] = Best::none();
#pragma unroll 1
      for (int tile = 0; tile < count; tile += kTileRows) {
        Products<kBlocks> x = {};
        for (int part = 0; part < parts; ++part) {
          if (parts > 1) keys.load(own, left, pieces, part, wide);
          multiply<typename Keys::Stored, kPieces>(x, keys, units + tile * packed.pitch, packed.pitch,
                                                   packed.row_bytes / 16, part);
        }
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              best[2 * m + e / 2].meet(x[m][t][e], from + tile + 8 * t + lane % 4 * 2 + e % 2);
      }
      // Of the four lanes that share keys, lane c continues with key l / 4 + 8 c.
      Best own_best = best[0];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
          best[i].meet(
              {__shfl_xor_sync(kWarp, best[i].product, step), __shfl_xor_sync(kWarp, best[i].prototype, step)});
        if (lane % 4 == i) own_best = best[i];
      }
      const int j = key + lane / 4 + lane % 4 * 8;
      const bool mine = lane % 4 < kOwn && j < end;
      if (mine && !is_first) own_best.meet({carry[j], assignment[j]});
      if (is_last) {
        finish_assignment<T, kPaged>(p, head, j, mine, first <= j && j < last, own_best);
      } else if (mine) {
        carry[j] = own_best.product;
        assignment[j] = own_best.prototype;
      }
    }
  }
}

struct AssignMemory {
  char* packed;  // the prototypes
  float* carry;  // [b, Hk, n]: each key's best product, kept between chunks

  AssignMemory(const AssignPrototypesParams& p, const PackedPrototypes& plan, Sections& sections)
      : packed(sections.add<char>(plan.bytes)), carry(sections.add<float>(plan.carry ? p.b * p.heads * p.n : 0)) {}
};
inline int64_t assign_prototypes_workspace(const AssignPrototypesParams& p) {
  return bytes_of<AssignMemory>(p, PackedPrototypes::of(p));
}

inline void assign_prototypes_cuda(const AssignPrototypesParams& p, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.b * p.heads;
  if (heads * p.n == 0) return;
  const PackedPrototypes packed = PackedPrototypes::of(p);
  const Splits splits = Splits::of(p.n, heads);
  Sections sections{workspace};
  const AssignMemory memory(p, packed, sections);
  float* const carry = packed.carry ? memory.carry : nullptr;
  const bool wide = aligned_rows(p.k, p.b, p.heads, p.n);
  with_read_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<pack_prototypes_kernel<Product<T>>>(grid_of((heads * packed.rows + 7) / 8), 256, 0, stream, p, packed,
                                               memory.packed);
    if (sm90::assign_prototypes(p, packed.view(p, memory.packed), packed.rows, stream)) return;
    const auto assign = [&](auto pieces) {
      with_pages<T>(p.k, [&](auto paged) {
        launch<assign_prototypes_kernel<T, decltype(pieces)::value, paged>>(
            grid_of(heads * splits.count), kAssignThreads, int64_t{packed.chunk} * packed.pitch, stream, p, packed,
            memory.packed, carry, splits, wide);
      });
    };
    packed.row_bytes <= 256 ? assign(Constant<4>{}) : assign(Constant<8>{});
  });
}

}  // namespace
}  // namespace kvops
