// Products of bf16 and int8 numbers on AMX tiles. The level v4_amx has them; it is the code of v4_bf16, which asks
// has_tiles().
//
// A tile register holds up to 16 rows of 64 bytes, for example 32 channels of 16 keys, which it loads in place. One
// instruction multiplies it with 32 numbers of up to 16 rows and adds the products, in fp32, to a third register: as
// many as 256 dot-product instructions of AVX512-BF16, in 16 cycles. The second operand is stored in pairs: word w of a
// row is numbers 2w and 2w + 1, and the same words of all rows are neighbours. That is how products.h packs rows too.
//
// Rounding is that of the dot-product instructions: exact products, sums in fp32, subnormal numbers are 0.
#pragma once
#include "products.h"

namespace kvops {
bool has_tiles();  // whether the level in use is v4_amx
}

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kTileRows = 16;   // of a tile's first operand
constexpr int kTileWords = 16;  // of a row: 32 numbers in bf16, 64 in int8

// The shape of a tile register.
struct TileShape {
  uint8_t rows;
  uint16_t bytes;
};
constexpr TileShape kWholeTile = {16, VB};

// Pairs of bf16 numbers, from floats that hold them; other floats are truncated.
inline U pair(F low, F high) {
  return (U)low >> 16 | ((U)high & 0xffff0000u);
}

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

// The tile registers of this thread, until they are released. (A destructor would bring exception tables, and these a
// weak symbol.)
class Tiles {
 public:
  const bool on;

  Tiles(bool wanted, const TileShape (&shapes)[8]) : on(wanted && has_tiles()) {
    if (!on) return;
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = shapes[i].bytes, config.rows[i] = shapes[i].rows;
    written();
    _tile_loadconfig(&config);
  }
  Tiles(const Tiles&) = delete;

  void release() const {
    if (on) _tile_release();
  }

  // After about 900 cycles without a product, the tile unit goes to sleep, and waking it takes about 800 cycles. Where
  // vector code between two products runs longer than that, it issues a product of whatever registers 5 and 3 hold;
  // what this adds to register 7 is discarded.
  void keep_awake() const {
    if (on) _tile_dpbf16ps(7, 5, 3);
  }

  static Tiles all_whole(bool wanted) {
    constexpr TileShape x = kWholeTile;
    return {wanted, {x, x, x, x, x, x, x, x}};
  }

  // Loads of tiles are not memory accesses to the compiler: they must come after what was written for them.
  static void written() { asm volatile("" ::: "memory"); }
};

// out[kTileRows][N vectors] = the sum over steps of first(step) times the step's part of `second`. first(step) is where
// a tile's rows begin, `stride` bytes apart; second: [steps][kTileWords][N vectors]. Registers: 0 to 3 sums, 4 the
// first operand, 5 to 7 the second; all whole.
template <int N, class First>
inline void multiply_tile(int64_t steps, const First& first, int64_t stride, const float* second, float* out) {
  Tiles::written();
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2) _tile_zero(2);
  if constexpr (N > 3) _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, second += kTileWords * N * VL) {
    _tile_loadd(4, first(step), stride);
    _tile_loadd(5, second, N * VB);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(6, second + VL, N * VB);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, second + 2 * VL, N * VB);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, second + 3 * VL, N * VB);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, out, N * VB);
  if constexpr (N > 1) _tile_stored(1, out + VL, N * VB);
  if constexpr (N > 2) _tile_stored(2, out + 2 * VL, N * VB);
  if constexpr (N > 3) _tile_stored(3, out + 3 * VL, N * VB);
}
#else
constexpr bool kHasTiles = false;

struct Tiles {
  static constexpr bool on = false;
  Tiles(bool, const TileShape (&)[8]) {}
  static Tiles all_whole(bool) { return {false, {}}; }
  void keep_awake() const {}
  void release() const {}
};

template <int N, class First>
void multiply_tile(int64_t steps, const First& first, int64_t stride, const float* second, float* out);
#endif

}  // namespace
}  // namespace kvops::KVOPS_ISA
