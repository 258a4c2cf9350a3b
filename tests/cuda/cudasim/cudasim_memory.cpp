// cudasim_memory.cpp: global memory as weak between blocks as CUDA's. Replaces ThreadSanitizer's runtime, so it is
// linked with objects compiled with -fsanitize=thread, and is itself compiled without it.
//
// A block's stores to global memory are visible only to itself until it publishes them: by __threadfence(),
// store_release(), cluster_sync() or its end. Its plain loads do not see what others have published since it last
// refreshed; they find stale lines in L1. load_acquire() and cluster_sync() refresh, and so does __threadfence() after
// an atomic or __ldcg, which may have learned about another block. __ldcg itself sees what is published. Atomics take
// place in L2, visible to all, and publish or refresh nothing else. This is the least that CUDA guarantees; a GPU often
// does better.
//
// Each block has its own view of some bytes; all others are as in memory. While a block runs, its view is in memory and
// the common view is set aside; when another block runs, they are swapped. This needs blocks that run concurrently:
// CUDASIM_SEED >= 2.
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cudasim_access.h"

namespace {
using cudasim::Access;

struct View {
  struct Line {                    // of 64 bytes
    uint64_t stored = 0, old = 0;  // which bytes the block has stored, or sees in an old state
    unsigned char aside[64];       // for those bytes: the common view or, while the block does not run, the block's
  };
  std::unordered_map<uintptr_t, Line> lines;  // by line number
  bool heard = false;                         // whether it has learned about others since it last refreshed
};

struct Lane {  // a thread of a block, or of the host
  const void* block = nullptr;
  uintptr_t stack = 0;
  size_t stack_bytes = 0;
  int muted = 0;
  bool past_l1 = false;
};
Lane host, *current = &host;

unsigned char* line_at(uintptr_t number) { return reinterpret_cast<unsigned char*>(number * 64); }

// Calls f(line number, mask of bytes) for each line that these bytes touch.
template <class F>
void each_line(const void* p, size_t bytes, F f) {
  for (uintptr_t at = reinterpret_cast<uintptr_t>(p), end = at + bytes; at < end; at = (at / 64 + 1) * 64) {
    const uintptr_t last = std::min(end, (at / 64 + 1) * 64);
    f(at / 64, ~uint64_t{0} >> (64 - (last - at)) << at % 64);
  }
}
template <class F>
void each_byte(uint64_t mask, F f) {
  for (; mask; mask &= mask - 1) f(__builtin_ctzll(mask));
}

struct Memory final : cudasim::Watcher {
  std::unordered_map<const void*, View> views;                 // of the resident blocks
  std::map<uintptr_t, std::pair<const void*, size_t>> shared;  // their shared memory, by end address
  const void* running = nullptr;                               // the block whose view is in memory

  Memory() { cudasim::watcher = this; }

  void block_begins(const void* block, uint64_t) override { views[block]; }
  void has_shared(const void* block, const void* p, size_t bytes) override {
    shared[reinterpret_cast<uintptr_t>(p) + bytes] = {block, bytes};
  }
  void block_ends(const void* block) override {
    refreshes(), publishes();
    views.erase(block), running = nullptr;
    std::erase_if(shared, [&](auto& x) { return x.second.first == block; });
  }
  void launch_ends() override { views.clear(), shared.clear(), running = nullptr; }
  void thread_begins(void* fiber, const void* block, unsigned, const void* stack, size_t stack_bytes) override {
    auto& lane = *static_cast<Lane*>(fiber);
    lane = {block, reinterpret_cast<uintptr_t>(stack), stack_bytes, lane.muted};
  }

  void exchange(const void* block) {
    const auto it = views.find(block);
    if (it == views.end()) return;
    for (auto& [number, line] : it->second.lines)
      each_byte(line.stored | line.old, [&](int i) { std::swap(line_at(number)[i], line.aside[i]); });
  }
  void run(const void* block) {
    if (block == running) return;
    exchange(running), exchange(block);
    running = block;
  }

  bool is_global(uintptr_t at) const {
    if (at - current->stack < current->stack_bytes) return false;
    const auto it = shared.upper_bound(at);
    return it == shared.end() || at < it->first - it->second.second;
  }

  // Makes these bytes of a line, as they are in memory, the common view. The other blocks' views stay as they are.
  void publish(uintptr_t number, uint64_t mask, const unsigned char* was) {
    for (auto& [block, view] : views) {
      if (block == running) continue;
      auto& line = view.lines[number];
      each_byte(mask & ~line.stored & ~line.old, [&](int i) { line.aside[i] = was[i]; });
      line.old |= mask & ~line.stored;
    }
  }
  void publishes() override {
    const auto it = views.find(running);
    if (it == views.end()) return;
    for (auto& [number, line] : it->second.lines) {
      if (line.stored) publish(number, std::exchange(line.stored, 0), line.aside);
    }
    std::erase_if(it->second.lines, [](auto& x) { return !x.second.old; });
  }
  void refresh(uintptr_t number, View::Line& line, uint64_t mask) {
    each_byte(line.old & mask, [&](int i) { line_at(number)[i] = line.aside[i]; });
    line.old &= ~mask;
  }
  void refreshes() override {
    const auto it = views.find(running);
    if (it == views.end()) return;
    for (auto& [number, line] : it->second.lines) refresh(number, line, ~uint64_t{0});
    std::erase_if(it->second.lines, [](auto& x) { return !x.second.stored; });
    it->second.heard = false;
  }
  void fences() override {
    publishes();
    if (const auto it = views.find(running); it != views.end() && it->second.heard) refreshes();
  }

  void past_l1() override { current->past_l1 = true; }
  void hush(int by) override { current->muted += by; }

  // Called before the access takes place.
  void access(Access kind, const void* p, size_t bytes) override {
    const bool past_l1 = std::exchange(current->past_l1, false) || kind == Access::CopyRead;
    const auto it = views.find(current->block);
    if (it == views.end() || (kind == Access::Read && !past_l1) || !is_global(reinterpret_cast<uintptr_t>(p))) return;
    each_line(p, bytes, [&](uintptr_t number, uint64_t mask) {
      if (kind == Access::Write) {
        auto& line = it->second.lines[number];
        each_byte(mask & ~line.stored & ~line.old, [&](int i) { line.aside[i] = line_at(number)[i]; });
        line.stored |= mask, line.old &= ~mask;
        return;
      }
      it->second.heard = true;
      if (const auto known = it->second.lines.find(number); known != it->second.lines.end()) {
        refresh(number, known->second, mask);
        if (kind == Access::Atomic && (known->second.stored & mask)) {
          publish(number, known->second.stored & mask, known->second.aside);
          known->second.stored &= ~mask;
        }
      }
      if (kind == Access::Atomic) publish(number, mask, line_at(number));
    });
  }
};
Memory memory;

void on_access(Access kind, const void* p, size_t bytes, uintptr_t) { memory.access(kind, p, bytes); }
void on_switch(Lane& to) { memory.run(to.block); }
}  // namespace

#include "cudasim_tsan.h"

extern "C" {
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
