// cudasim_memory.cpp: global memory as weak as CUDA's, between blocks. It takes the place of ThreadSanitizer's runtime,
// so it is linked with objects of -fsanitize=thread, and is itself compiled without.
//
// What a block stores in global memory only it sees, until it publishes: by __threadfence(), store_release(),
// cluster_sync() or its end. What others have published since it last refreshed, its plain loads do not see: they find
// old lines in L1. load_acquire() and cluster_sync() refresh, and __threadfence() behind an atomic or __ldcg, which may
// have told of another block. __ldcg itself sees what is published. Atomics take place in L2, in front of all, and
// publish and refresh nothing else. That is the least that CUDA promises; a GPU often does better.
//
// Each block has its view of some bytes; the others are as in memory. While a block runs, its view lies in memory and
// what all see lies aside. When another runs, they change places. That takes blocks which run at once: CUDASIM_SEED
// >= 2.
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
    uint64_t stored = 0, old = 0;  // which bytes the block has stored, or sees as they were
    unsigned char aside[64];       // of those: what all see, or, while the block does not run, what it sees
  };
  std::unordered_map<uintptr_t, Line> lines;  // by their number
  bool heard = false;                         // has it looked at what others do since it last refreshed?
};

struct Lane {  // a thread of a block, or the host's
  const void* block = nullptr;
  uintptr_t stack = 0;
  size_t stack_bytes = 0;
  int muted = 0;
  bool past_l1 = false;
};
Lane host, *current = &host;

unsigned char* line_at(uintptr_t number) { return reinterpret_cast<unsigned char*>(number * 64); }

// f(number of a line, its bytes as a mask) for the lines of these bytes.
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
  std::unordered_map<const void*, View> views;                 // of the blocks that are resident
  std::map<uintptr_t, std::pair<const void*, size_t>> shared;  // their shared memory, by its end
  const void* running = nullptr;                               // whose view lies in memory

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

  // What all see at these bytes of a line becomes what memory has there; to the other blocks it stays what it is.
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

  // Before it takes place.
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
