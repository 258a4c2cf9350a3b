// How warps read rows of K and V: in 16-byte pieces, as fp32 in registers.
//
// A row of d elements is d * itemsize / 16 pieces. `kLanes` neighbouring lanes of a warp share a row (a power of two,
// so that their sums take log2 shuffles), so a warp reads 32 / kLanes rows at once. Lane l holds pieces l, l + kLanes,
// ... (`kPieces` of them). with_lanes() picks both from the number of pieces.
#pragma once
#include <type_traits>

#include "../dispatch.h"
#include "device.cuh"

namespace kvops {
namespace {

constexpr unsigned kWarp = 0xffffffffu;  // the mask of all lanes

template <int Lanes, int Pieces>
struct RowLanes {
  static constexpr int kLanes = Lanes, kPieces = Pieces, kRows = 32 / Lanes;
};

// The type that rows of T are computed as. fp8 and int8 become bf16 as they are loaded; a piece is 8 bytes in memory.
template <class T>
using Value = std::conditional_t<sizeof(T) == 1, BFloat16, T>;

// Elements per piece, and its bytes in memory.
template <class T>
constexpr int kPiece = 16 / static_cast<int>(sizeof(Value<T>));
template <class T>
constexpr int kPieceBytes = kPiece<T> * static_cast<int>(sizeof(T));

// Calls fn(RowLanes<...>{}) for rows of T with this many pieces. Checks have rejected rows wider than kMaxHeadDim.
template <class T = float, class Fn>
inline void with_lanes(int64_t pieces, const Fn& fn) {
  if (pieces <= 8) return fn(RowLanes<8, 1>{});
  if (pieces <= 16) return fn(RowLanes<16, 1>{});
  if (pieces <= 32) return fn(RowLanes<32, 1>{});
  if (pieces <= 64) return fn(RowLanes<32, 2>{});
  if constexpr (sizeof(T) == 4) {
    if (pieces > 128) return fn(RowLanes<32, 8>{});
  }
  return fn(RowLanes<32, 4>{});
}

// The bitwise or of the address of x's first row and its strides: all rows are aligned to a power of two if this is.
// The strides of dims of size one do not matter. For pages, the first dim counts pages and the token dim counts a
// page's slots.
inline uint64_t address_bits(const KVView& x, int64_t b, int64_t heads, int64_t n) {
  if (x.table) {
    b = x.num_pages;
    n = x.page_size;
  }
  return reinterpret_cast<uintptr_t>(x.data) | static_cast<uint64_t>(b > 1 ? x.stride_b : 0) |
         static_cast<uint64_t>(heads > 1 ? x.stride_h : 0) | static_cast<uint64_t>(n > 1 ? x.stride_n : 0);
}

// Whether rows can be read in whole pieces.
inline bool aligned_rows(const KVView& x, int64_t b, int64_t heads, int64_t n) {
  return address_bits(x, b, heads, n) % 16 == 0;
}

// The rows of a head. Kernels are instantiated for dense memory and for pages, and the compiler drops what each does
// not need. 1-byte types, which are rarely dense, have one instance for both.
template <bool kPaged, class T = float>
__device__ inline HeadRows head_rows(KVView x, int64_t b, int64_t h) {
  if constexpr (!kPaged) x.table = nullptr;
  const HeadRows rows = x.head(b, h);
  if (kPaged && sizeof(T) > 1 && !rows.pages) __builtin_unreachable();
  return rows;
}

// Calls fn(std::bool_constant<kPaged>{}) for K, or K and V, of T, so that only paged calls pay for page lookups.
template <class T = float, class Fn>
inline void with_pages(const KVView& x, const Fn& fn) {
  if constexpr (sizeof(T) == 1)
    fn(std::true_type{});
  else
    x.table ? fn(std::true_type{}) : fn(std::false_type{});
}

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(Half x) {
  return __half2float(__ushort_as_half(x.bits));
}
__device__ inline float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

__device__ inline bool is_finite(float x) {
  return fabsf(x) < CUDART_INF_F;
}

// Rounds to nearest, ties to even.
template <class T>
__device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else if constexpr (std::is_same_v<T, Half>)
    return {__half_as_ushort(__float2half_rn(x))};
  else
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

// Loads 4 bytes, element by element.
template <class T>
__device__ inline unsigned load_word(const char* p) {
  if constexpr (sizeof(T) == 4) {
    return __ldg(reinterpret_cast<const unsigned*>(p));
  } else if constexpr (sizeof(T) == 1) {
    const unsigned char* byte = reinterpret_cast<const unsigned char*>(p);
    return __ldg(byte) | __ldg(byte + 1) << 8 | __ldg(byte + 2) << 16 | __ldg(byte + 3) << 24;
  } else {
    const unsigned short* half = reinterpret_cast<const unsigned short*>(p);
    return __ldg(half) | static_cast<unsigned>(__ldg(half + 1)) << 16;
  }
}

// The products of two bf16 pairs, subnormals included.
__device__ inline unsigned multiply_bf16(unsigned x, unsigned y) {
#ifdef __CUDACC__
  unsigned product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(x), "r"(y), "r"(0x80008000u));
  return product;
#else
  const auto one = [](unsigned i, unsigned j) -> unsigned {
    return from_float<BFloat16>(to_float(BFloat16{static_cast<uint16_t>(i)}) *
                                to_float(BFloat16{static_cast<uint16_t>(j)}))
        .bits;
  };
  return one(x & 0xffffu, y & 0xffffu) | one(x >> 16, y >> 16) << 16;
#endif
}

// Two fp8 numbers, each in the upper half of 16 bits, as bf16: exponent and mantissa are moved to where bf16 has them,
// and the product adjusts the bias. NaN (and infinity) get the exponent of bf16's NaN and infinity.
template <class T>
__device__ inline unsigned widen_two(unsigned x) {
  constexpr bool e4m3 = std::is_same_v<T, E4M3>;
  constexpr unsigned kBias = e4m3 ? 0x7b807b80u : 0x77807780u;     // 2^120 or 2^112
  constexpr unsigned kSpecial = e4m3 ? 0x01000100u : 0x04000400u;  // carries into the sign bit for NaN (and infinity)
  const unsigned magnitude = x & 0x7f007f00u, special = (magnitude + kSpecial) & 0x80008000u;
  return multiply_bf16(magnitude >> (e4m3 ? 4 : 3), kBias) | (special - (special >> 8)) | (x & 0x80008000u);
}

// x - y for bf16 pairs whose differences are bf16 numbers.
__device__ inline unsigned subtract_bf16(unsigned x, unsigned y) {
#ifdef __CUDACC__
  unsigned difference;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(x), "r"(0x3f803f80u), "r"(y ^ 0x80008000u));
  return difference;
#else
  const auto one = [](unsigned i, unsigned j) -> unsigned {
    return from_float<BFloat16>(to_float(BFloat16{static_cast<uint16_t>(i)}) -
                                to_float(BFloat16{static_cast<uint16_t>(j)}))
        .bits;
  };
  return one(x & 0xffffu, y & 0xffffu) | one(x >> 16, y >> 16) << 16;
#endif
}

// Two int8 numbers, each in the lower half of 16 bits, as bf16: 128 plus the lower 7 bits is one word of mantissa, and
// what is to be subtracted, 128 or for negative numbers 256, another.
__device__ inline unsigned widen_two_integers(unsigned x) {
  return subtract_bf16((x & 0x007f007fu) | 0x43004300u, (x & 0x00800080u) | 0x43004300u);
}

// A piece in the type of the arithmetic, from its bytes.
template <class T>
__device__ inline uint4 widen(uint4 raw) {
  if constexpr (std::is_same_v<T, Int8>) {
    return make_uint4(
        widen_two_integers(__byte_perm(raw.x, 0, 0x4140)), widen_two_integers(__byte_perm(raw.x, 0, 0x4342)),
        widen_two_integers(__byte_perm(raw.y, 0, 0x4140)), widen_two_integers(__byte_perm(raw.y, 0, 0x4342)));
  } else if constexpr (sizeof(T) == 1) {
    return make_uint4(widen_two<T>(__byte_perm(raw.x, 0, 0x1404)), widen_two<T>(__byte_perm(raw.x, 0, 0x3424)),
                      widen_two<T>(__byte_perm(raw.y, 0, 0x1404)), widen_two<T>(__byte_perm(raw.y, 0, 0x3424)));
  } else {
    return raw;
  }
}
__device__ inline float to_float(Int8 x) {
  return x.value;
}
template <class T>
__device__ inline std::enable_if_t<sizeof(T) == 1, float> to_float(T x) {
  return to_float(BFloat16{static_cast<uint16_t>(widen_two<T>(unsigned{x.bits} << 8))});
}

// The bytes of a piece: one access if rows are 16-byte aligned (kWide), otherwise element by element. The choice is
// made outside the loop that issues the loads, which would otherwise wait for one another.
template <class T, bool kWide>
__device__ inline uint4 load_raw(const char* p) {
  if constexpr (sizeof(T) == 1) {
    const uint2 raw =
        kWide ? __ldg(reinterpret_cast<const uint2*>(p)) : make_uint2(load_word<T>(p), load_word<T>(p + 4));
    return make_uint4(raw.x, raw.y, 0, 0);
  } else if constexpr (kWide) {
    return __ldg(reinterpret_cast<const uint4*>(p));
  } else {
    return make_uint4(load_word<T>(p), load_word<T>(p + 4), load_word<T>(p + 8), load_word<T>(p + 12));
  }
}
template <class T, bool kWide>
__device__ inline uint4 load_piece(const char* p) {
  return widen<T>(load_raw<T, kWide>(p));
}

// The elements of a piece, as floats.
template <class T>
__device__ inline void unpack(uint4 piece, float (&x)[kPiece<T>]) {
  const unsigned word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(word[i]);
    } else {
      x[2 * i] = to_float(Value<T>{static_cast<uint16_t>(word[i] & 0xffffu)});
      x[2 * i + 1] = to_float(Value<T>{static_cast<uint16_t>(word[i] >> 16)});
    }
  }
}

// A piece of these elements, rounded.
template <class T>
__device__ inline uint4 pack(const float (&x)[kPiece<T>]) {
  unsigned word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4)
      word[i] = __float_as_uint(x[i]);
    else
      word[i] = from_float<Value<T>>(x[2 * i]).bits | static_cast<unsigned>(from_float<Value<T>>(x[2 * i + 1]).bits)
                                                          << 16;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace
}  // namespace kvops
