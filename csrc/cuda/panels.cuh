// Rows that a block multiplies its keys with, panel by panel in shared memory: what key_similarity and value_norm
// share.
//
// A warp holds 16 or 32 keys in registers and multiplies them with 16 rows at a time (window.cuh). All rows of a head
// do not fit in shared memory, so the block passes over panels of them. While it works on one panel, the next one is
// being copied; head dims too wide for two panels have one.
#pragma once
#include "async.cuh"
#include "window.cuh"

namespace kvops {
namespace {

constexpr int kPanelThreads = 256, kPanelWarps = kPanelThreads / 32;
constexpr int kMostPanelRows = 64;

struct PanelPlan {
  int row_bytes;  // a multiple of 64: zeros follow the row
  int pitch;      // bytes from row to row in shared memory, see window.cuh
  int rows;       // in a panel: 64, 32 or 16
  int stages;     // panels in shared memory, 1 or 2
  int bytes;      // of a panel

  // extra: bytes per row that lie behind the panel's rows.
  static PanelPlan of(int64_t row_bytes, int extra = 0) {
    PanelPlan x;
    x.row_bytes = static_cast<int>((row_bytes + 63) / 64 * 64);
    x.pitch = x.row_bytes % 128 ? x.row_bytes : x.row_bytes + 64;
    const int memory = shared_memory() - 1024, each = x.pitch + extra;
    x.rows = kMostPanelRows;
    while (x.rows > kTileRows && 2 * x.rows * each > memory) x.rows /= 2;
    x.stages = 2 * x.rows * each <= memory ? 2 : 1;
    x.bytes = x.rows * each;
    return x;
  }
};

// Calls use(i, panel) for panels i = 0, 1, ... of `count`, each loaded by load(i, panel) before. Stops after a panel
// for which use() returned false in all threads. Called by the whole block.
template <class Load, class Use>
__device__ inline void for_panels(const PanelPlan& plan, char* memory, int count, const Load& load, const Use& use) {
  const auto begin = [&](int i, char* panel) {
    if (i >= count) return;
    load(i, panel);
    end_copies();
  };
  begin(0, memory);
  for (int i = 0; i < count; ++i) {
    char* const panel = memory + i % plan.stages * plan.bytes;
    wait_for_copies<0>();
    __syncthreads();  // the panel is loaded
    if (plan.stages == 2) begin(i + 1, memory + (i + 1) % 2 * plan.bytes);
    if (!__syncthreads_or(use(i, panel))) break;  // from here on nobody reads it
    if (plan.stages == 1) begin(i + 1, panel);
  }
  wait_for_copies<0>();
}

}  // namespace
}  // namespace kvops
