// cudasim.h: runs CUDA C++ kernels on the host, without a GPU, so that tests can check what they compute.
//
// Compile a kernel's .cuh as ordinary C++20 with this header in place of nvcc's. Each CUDA thread is a fiber. Fibers
// are switched only where CUDA threads can wait for each other (barriers, warp collectives, loads of flags), and at
// random at atomics and fences. Every run is therefore repeatable, and CUDASIM_SEED chooses the order:
//   unset or 0  lowest thread and block first    1  highest thread and block first    2, 3, ...  random
// In random orders 2, 3, 4 or 48 blocks run at once (in orders 2, 3, 4, 5, and so on), in the others one after another.
// Among 48, some blocks, and a warp of some others, are starved: they run only when nothing else can, or when others
// keep loading flags. The blocks of a cluster always run together.
// CUDASIM_DEVICE=small|hopper|a100|h200|b200|rtx3090|rtx5090 chooses the GPU (cudasim_gpu.h) that plans and launches
// are checked against.
// CUDASIM_DRY=FILE runs no kernel, but appends each launch's grid, block, dynamic shared memory and cluster to FILE.
// Where CUDA's behaviour is undefined, the simulator throws an Error: a barrier or collective that not every thread
// reaches, or that threads reach at different lines; a shuffle from a lane that does not take part; access to the
// shared memory of a block that may not have started or may have ended; a flag that a thread loads again and again
// while nothing changes, as when its block waits for one that has not started; and an impossible launch, such as one
// with more than 48 KiB of static and dynamic shared memory that has not opted in. Shared memory is filled with 0xff
// (NaN, or -1) before each block.
//
// Sanitizers see the kernel's memory as usual. For -fsanitize=thread every CUDA thread is a thread, and only barriers,
// fences and flags order memory, as in CUDA, so it finds races between neighbouring blocks, too. Objects compiled with
// -fsanitize=thread can be linked with our own runtimes instead: cudasim_traffic.cpp counts the memory traffic of
// kernels; cudasim_memory.cpp makes memory between blocks as weak as CUDA's. Plain builds have one memory, in which
// every store is visible at once.
//
// Not simulated: time, the code that nvcc generates, reordering of one thread's own loads and stores, weak memory
// within a block or cluster and for single threads, inline PTX, cooperative groups, textures, dynamic parallelism,
// __activemask. Launches from several host threads run one at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <driver_types.h>
#include <elf.h>
#include <link.h>
#include <math_constants.h>
#include <sys/mman.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>
#if !defined(__x86_64__) || defined(CUDASIM_UCONTEXT)
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char*, int), AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int), AnnotateIgnoreWritesEnd(const char*, int);
#endif

#include "cudasim_access.h"

#pragma GCC visibility push(hidden)  // each library of kernels has its own simulator

// ---- Language keywords -------------------------------------------------------------------------------------------
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __grid_constant__
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(::cudasim::sim.dynamic_shared())

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// What every switch of fibers passes through is not instrumented: that would take half of the time under sanitizers.
#define CUDASIM_RAW __attribute__((no_sanitize("address", "thread", "undefined")))

namespace cudasim {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Where = std::source_location;
}  // namespace cudasim

#include "cudasim_gpu.h"
#include "cudasim_shared.h"

namespace cudasim {

// A queue that is indexed like an array. Standard containers would be instrumented.
template <class T>
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  ~Ring() { std::free(items_); }
  CUDASIM_RAW size_t size() const { return count_; }
  CUDASIM_RAW T& operator[](size_t i) { return items_[(first_ + i) & (kept_ - 1)]; }
  CUDASIM_RAW void push_back(T x) {
    if (count_ == kept_) grow();
    items_[(first_ + count_++) & (kept_ - 1)] = x;
  }
  CUDASIM_RAW void push_front(T x) {
    if (count_ == kept_) grow();
    first_ = (first_ + kept_ - 1) & (kept_ - 1), ++count_, items_[first_] = x;
  }
  CUDASIM_RAW T pop_back() { return items_[(first_ + --count_) & (kept_ - 1)]; }
  CUDASIM_RAW T pop_front() {
    const T x = items_[first_];
    first_ = (first_ + 1) & (kept_ - 1), --count_;
    return x;
  }
  CUDASIM_RAW void clear() { first_ = count_ = 0; }

 private:
  __attribute__((noinline)) CUDASIM_RAW void grow() {
    T* const more = static_cast<T*>(std::malloc(sizeof(T) * (kept_ ? 2 * kept_ : 32)));
    if (!more) throw std::bad_alloc();
    for (size_t i = 0; i < count_; ++i) more[i] = (*this)[i];
    std::free(items_);
    items_ = more, first_ = 0, kept_ = kept_ ? 2 * kept_ : 32;
  }
  T* items_ = nullptr;
  size_t first_ = 0, count_ = 0, kept_ = 0;
};

struct Random {  // std::minstd_rand
  using result_type = uint32_t;
  uint32_t state = 1;
  static constexpr uint32_t min() { return 1; }
  static constexpr uint32_t max() { return 0x7ffffffe; }
  CUDASIM_RAW uint32_t operator()() { return state = uint32_t(state * uint64_t{48271} % 0x7fffffff); }
  void seed(uint32_t x) { state = x % 0x7fffffff ? x % 0x7fffffff : 1; }
};

struct Site {  // an operation at which threads meet, and its place in the kernel's source
  const char* op = "";
  Where at{};
  std::string str() const { return std::string(op) + " at " + at.file_name() + ":" + std::to_string(at.line()); }
  CUDASIM_RAW bool operator==(const Site& o) const {
    const char *file = at.file_name(), *its = o.at.file_name();  // literals, mostly the same one
    return at.line() == o.at.line() && (op == o.op || !std::strcmp(op, o.op)) &&
           (file == its || !std::strcmp(file, its));
  }
};

#if defined(__x86_64__) && !defined(CUDASIM_UCONTEXT)
using Saved = void*;  // a stack pointer; the registers are saved above it
#else
using Saved = ucontext_t;
#endif

struct Copy {  // cp.async
  void* to;
  const void* from;
  size_t bytes;
};

struct Block;
struct Meeting;

struct Fiber {    // one CUDA thread, or the host's launch
  Saved saved{};  // while another fiber runs
  Block* block = nullptr;
  char* stack = nullptr;
  size_t bytes = 0;
  uint3 tid{};
  unsigned rank = 0;
  enum { Ready, Waiting, Done } state = Ready;
  Site site;  // where it waits, or last did
  bool starved = false;
  uint64_t polled = 0;     // Sim::changes when it last loaded a flag
  unsigned polls = 0;      // such loads since then
  Meeting* met = nullptr;  // the last one among lanes of its warp
  void *asan = nullptr, *tsan = nullptr;
  bool quiet = false;
  std::deque<std::vector<Copy>> copies;  // groups in flight, the last one still open
};

struct Arrival {
  Fiber* fiber;  // null: it does not wait
  void* brought;
};

struct Meeting {  // a rendezvous of the threads of a block or cluster, or of the lanes `mask` of a warp
  unsigned mask = 0, generation = 0;
  Site site;
  Ring<Arrival> here;
  char order[2];  // for happens_before() and happens_after(), alternating
};

struct Cluster;

struct Block {  // a resident block
  uint3 index{};
  Cluster* cluster = nullptr;
  unsigned rank = 0;  // in the cluster
  unsigned live = 0;
  std::deque<Fiber>* fibers = nullptr;
  Meeting barrier;
  std::vector<std::deque<Meeting>> warps;  // by warp, one for each mask in use
  size_t dynamic_bytes = 0;
  Memory dynamic_shared;          // on the heap: fresh memory, with no history in the race detector
  std::vector<Memory> variables;  // __shared__ variables by number, once the block has touched them
  std::shared_ptr<void> engine;   // of cudasim_sm90.h
  unsigned seen_at = 0;           // when another block last got an address in its shared memory, in cluster_sync()s
};

struct Cluster {
  std::deque<Block> blocks;
  unsigned live = 0;  // blocks
  Meeting barrier;
};

// ---- Stacks --------------------------------------------------------------------------------------------------------
[[noreturn]] void fiber_main();
#if defined(__x86_64__) && !defined(CUDASIM_UCONTEXT)
__attribute__((naked, noinline, noipa)) CUDASIM_RAW inline void switch_stack(Saved* /*save*/, Saved* /*load*/) {
  asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi)\n"
      "movq (%rsi), %rsp; popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
inline void new_stack(Fiber& f) {
  void** top = reinterpret_cast<void**>(f.stack + f.bytes) - 8;
  std::fill(top, top + 8, nullptr);
  top[6] = reinterpret_cast<void*>(&fiber_main);  // above six registers, where `ret` finds it
  f.saved = top;
}
#else  // slower: each switch is a system call
inline void switch_stack(Saved* save, Saved* load) { swapcontext(save, load); }
inline void new_stack(Fiber& f) {
  getcontext(&f.saved);
  f.saved.uc_stack.ss_sp = f.stack;
  f.saved.uc_stack.ss_size = f.bytes;
  makecontext(&f.saved, &fiber_main, 0);
}
#endif

// ---- Annotations for the race detector -----------------------------------------------------------------------------
inline void happens_before([[maybe_unused]] char* p) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(p);
#endif
}
inline void happens_after([[maybe_unused]] char* p) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(p);
#endif
}
struct Quiet {  // during its lifetime, the race detector ignores the current fiber: it runs simulator code, not the
                // kernel
#ifdef __SANITIZE_THREAD__
  static void begin() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
  static void end() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
#else
  static void begin() {}
  static void end() {}
#endif
  Quiet() { begin(); }
  ~Quiet() { end(); }
};

// ---- The scheduler -------------------------------------------------------------------------------------------------
struct Sim {
  static constexpr size_t stack_bytes = 256 << 10;
  static constexpr uint64_t kCrowd = 48;  // blocks at once
#ifdef __SANITIZE_THREAD__
  static constexpr uint64_t kMostThreads = 4096;  // it has a limit
#else
  static constexpr uint64_t kMostThreads = 12288;  // the stack of each takes two mappings
#endif
  static constexpr unsigned kPolls = 1 << 16;  // a thread's loads of flags while nothing changes
  unsigned long seed = 0;
  Random random;
  Kernel* kernel = nullptr;
  std::string error;
  std::function<void()> body;
  std::deque<std::deque<Fiber>> pools;  // kept from one launch to the next
  std::deque<std::deque<Fiber>*> idle;  // unused pools, longest idle first
  Ring<Fiber*> ready, starved;          // of all blocks
  std::deque<std::unique_ptr<Cluster>> resident;
  Fiber outside, *self = &outside;
  Block* block = nullptr;  // of `self`
  unsigned threads = 0;    // per block
  bool ended = false;      // a cluster has ended and makes space for the next
  uint64_t to_start = 0;   // clusters
  uint64_t changes = 0;    // of flags and other atomics, and ends of threads
  size_t fruitless = 0;    // loads of flags since the last change
  char order[2];
  std::recursive_mutex launching;

  bool crowded() const { return seed > 1 && (seed - 2) % 4 == 3; }

  CUDASIM_RAW void make_ready(Fiber* f) { f->state = Fiber::Ready, (f->starved ? starved : ready).push_back(f); }

  CUDASIM_RAW Fiber* pick() {
    if (ended) return &outside;
    if (starved.size() && fruitless >= 16 * ready.size()) return starved.pop_front();
    if (!ready.size()) return &outside;
    if (seed > 1) {
      size_t i = random() % ready.size();  // prefer the same block
      for (int tries = 0; tries < 4 && ready[i]->block != block; ++tries) i = random() % ready.size();
      Fiber* const f = ready[i];
      ready[i] = ready[ready.size() - 1], ready[ready.size() - 1] = f;
    }
    return seed ? ready.pop_back() : ready.pop_front();
  }

  // Switches to another thread, or to the launch if no thread can run.
  __attribute__((always_inline)) CUDASIM_RAW void resume_another() {
    Fiber *from = self, *to = pick();
    if (to == &outside && !ended && error.empty()) error = describe("deadlock: no thread can go on");
    if (to == from) return;
    self = to, threadIdx = to->tid;
    if ((block = to->block)) blockIdx = block->index;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(from->state == Fiber::Done ? nullptr : &from->asan, to->stack, to->bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
    switch_stack(&from->saved, &to->saved);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(self->asan, nullptr, nullptr);
#endif
  }

  __attribute__((noinline)) CUDASIM_RAW void wait() { self->state = Fiber::Waiting, resume_another(); }

  __attribute__((noinline)) void preempt() {
    Quiet quiet;
    if (self != &outside && seed > 1 && random() % 2) make_ready(self), resume_another();
  }

  CUDASIM_RAW void changed() { fruitless = 0, ++changes; }

  // Called before a load of a flag: lets all other threads run first, since one may be about to set it. Barriers and
  // collectives are no change: a loop that waits for a flag may contain them.
  __attribute__((noinline)) void poll(const Site& site) {
    Quiet quiet;
    self->site = site;
    if (self->polled != changes) self->polled = changes, self->polls = 0;
    if (++self->polls > kPolls)
      fail("deadlock: " + site.str() + ", " + std::to_string(kPolls) + " times, and nothing changes" +
           (to_start ? "; " + std::to_string(to_start) + " clusters have not started" : ""));
    if (self->starved)
      fruitless = 0, starved.push_back(self);  // the others' turn again
    else
      ++fruitless, seed == 1 ? ready.push_front(self) : ready.push_back(self);
    resume_another();
  }

  [[noreturn]] __attribute__((noinline)) void fail(const std::string& what) {
    Quiet quiet;
    error = describe(what);
    ready.clear(), starved.clear();
    wait();
    __builtin_unreachable();
  }

  std::string describe(const std::string& what) {
    auto name = [](uint3 t) {
      return "(" + std::to_string(t.x) + "," + std::to_string(t.y) + "," + std::to_string(t.z) + ")";
    };
    auto doing = [](const Fiber& f) {
      if (f.state == Fiber::Done) return std::string("have returned");
      if (f.state == Fiber::Waiting) return "wait in " + f.site.str();
      return *f.site.op ? "can run on from " + f.site.str() : "can run";
    };
    std::string text = "cudasim: " + std::string(kernel->name) + ", block " + name(blockIdx) + ", warp " +
                       std::to_string(self->rank / 32) + ", thread " + name(self->tid) + ": " + what;
    for (const auto& cluster : resident) {
      for (const Block& b : cluster->blocks) {
        if (cluster->blocks.size() + resident.size() > 2) text += "\n  block " + name(b.index);
        const auto& fibers = *b.fibers;
        for (unsigned i = 0, end; i < threads; i = end) {
          for (end = i + 1; end < threads && doing(fibers[i]) == doing(fibers[end]); ++end) {
          }
          text += "\n  threads " + name(fibers[i].tid) + " to " + name(fibers[end - 1].tid) + " " + doing(fibers[i]);
        }
      }
    }
    return text;
  }

  // The current thread arrives at `meeting` with `arg` and waits until all `expected` threads have arrived. The last
  // one calls combine() first. `orders`: the operation also orders memory.
  template <class Combine>
  CUDASIM_RAW void meet(Meeting& meeting, unsigned expected, const Site& site, void* arg, bool orders,
                        Combine combine) {
    if (!*meeting.site.op) meeting.site = site;
    self->site = site;
    if (!(site == meeting.site)) diverged(site, meeting.site);
    char* order = &meeting.order[meeting.generation & 1];
    if (orders) happens_before(order);
    meeting.here.push_back({self, arg});
    if (meeting.here.size() < expected) {
      wait();
    } else {
      if (watcher && &meeting == &block->barrier) watcher->block_meets();
      combine();
      leave(meeting);
      if (seed) make_ready(self), resume_another();  // the last to arrive need not be the first to leave
    }
    if (orders) happens_after(order);
  }

  [[noreturn]] __attribute__((noinline)) void diverged(const Site& site, const Site& others) {
    fail("divergence: it comes to " + site.str() + " while others wait in " + others.str());
  }

  // Releases all threads at `meeting`.
  CUDASIM_RAW void leave(Meeting& meeting) {
    for (size_t i = 0; i < meeting.here.size(); ++i)
      if (Fiber* const f = meeting.here[i].fiber; f && f != self) make_ready(f);
    meeting.here.clear(), meeting.site = {}, ++meeting.generation;
  }

  // The current thread arrives at `meeting` without waiting.
  void come_by(Meeting& meeting, unsigned expected) {
    happens_before(&meeting.order[meeting.generation & 1]);
    meeting.here.push_back({});
    if (meeting.here.size() == expected) leave(meeting);
  }

  // Like meet(), for the lanes of a warp. combine(T* lane[32]) gets each lane's argument; null for lanes outside the
  // mask.
  template <class T, class Combine>
  CUDASIM_RAW void meet_warp(const Site& site, unsigned mask, T& arg, bool orders, Combine combine) {
    Quiet quiet;
    const unsigned past = threads - self->rank / 32 * 32;
    if (past < 32) mask &= ~0u >> (32 - past);  // ignore lanes past the end of the block
    if (!(mask >> self->rank % 32 & 1)) not_in_mask(site);
    if (!self->met || self->met->mask != mask) self->met = &meeting_of(mask);
    Meeting& meeting = *self->met;
    meet(meeting, __builtin_popcount(mask), site, &arg, orders, [&] {
      T* lanes[32] = {};
      for (size_t i = 0; i < meeting.here.size(); ++i) {
        const Arrival& x = meeting.here[i];
        lanes[x.fiber->rank % 32] = static_cast<T*>(x.brought);
      }
      if (watcher) watcher->warp_meets(mask);
      combine(lanes);
    });
  }

  // The meeting of these lanes of the current thread's warp.
  __attribute__((noinline)) Meeting& meeting_of(unsigned mask) {
    auto& meetings = block->warps[self->rank / 32];
    auto it = std::find_if(meetings.begin(), meetings.end(), [&](auto& m) { return m.mask == mask; });
    Meeting& meeting = it != meetings.end() ? *it : meetings.emplace_back();
    meeting.mask = mask;
    return meeting;
  }
  [[noreturn]] __attribute__((noinline)) void not_in_mask(const Site& site) {
    fail("this lane is not in the mask it gives to " + site.str());
  }

  void grow(std::deque<Fiber>& fibers) {
    while (fibers.size() < threads) {
      Fiber& f = fibers.emplace_back();
      constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      void* p = mmap(nullptr, 4096 + stack_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
      if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE)) throw std::bad_alloc();  // guard page against overflow
      f.rank = unsigned(fibers.size() - 1), f.stack = static_cast<char*>(p) + 4096, f.bytes = stack_bytes;
    }
#ifdef __SANITIZE_THREAD__
    for (auto& f : fibers)
      if (!f.tsan) f.tsan = __tsan_create_fiber(0), f.quiet = false;
#endif
  }

  // Makes the cluster whose first block is `index` resident.
  void start(uint3 index, unsigned blocks, size_t dynamic_bytes) {
    Cluster& cluster = *resident.emplace_back(new Cluster{std::deque<Block>(blocks), blocks, {}});
    for (unsigned rank = 0; rank < blocks; ++rank) {
      Block& b = cluster.blocks[rank];
      b.index = {index.x + rank, index.y, index.z}, b.cluster = &cluster, b.rank = rank, b.live = threads;
#ifdef __SANITIZE_THREAD__
      b.fibers = idle.front(), idle.pop_front();  // not those of the block before
#else
      b.fibers = idle.back(), idle.pop_back();
#endif
      grow(*b.fibers);
      b.warps.resize((threads + 31) / 32);
      b.dynamic_bytes = dynamic_bytes, b.dynamic_shared = shared_memory(dynamic_bytes);
      b.variables.resize(variables.sizes.size());
      const uint64_t number = (uint64_t(b.index.z) * gridDim.y + b.index.y) * gridDim.x + b.index.x;
      const unsigned starve = crowded() ? random() % 4 : 2, warp = random() % unsigned(b.warps.size());
      if (watcher) watcher->block_begins(&b, number), watcher->has_shared(&b, b.dynamic_shared.get(), dynamic_bytes);
      for (unsigned t = 0; t < threads; ++t) {
        Fiber& f = (*b.fibers)[t];
        f.block = &b;
        f.tid = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
        f.met = nullptr, f.site = {}, f.polls = 0;
        f.starved = starve == 0 || (starve == 1 && t / 32 == warp);
        if (f.copies.size() != 1 || !f.copies.back().empty()) f.copies.assign(1, {});
        if (watcher) watcher->thread_begins(f.tsan, &b, t, f.stack, f.bytes);
        new_stack(f), make_ready(&f);
      }
    }
  }

  // Appends a line per launch to the file that CUDASIM_DRY names, if only the plan is wanted.
  void note_launch(const char* path, unsigned cluster, dim3 grid, dim3 block, size_t dynamic_bytes) const {
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "a"), std::fclose);
    if (!file) throw Error(std::string("cudasim: cannot write ") + path);
    std::fprintf(file.get(), "%.*s\t%u,%u,%u\t%u,%u,%u\t%zu\t%u\n", int(kernel->name.size()), kernel->name.data(),
                 grid.x, grid.y, grid.z, block.x, block.y, block.z, dynamic_bytes, cluster);
  }

  void leave(Cluster& cluster) {
    for (Block& b : cluster.blocks) idle.push_back(b.fibers);
  }

  void run(Kernel& which, unsigned cluster, dim3 grid, dim3 block, size_t dynamic_bytes, std::function<void()> call) {
    Quiet quiet;
    const std::lock_guard lock(launching);
    kernel = &which, error.clear();
    const uint64_t size = uint64_t(block.x) * block.y * block.z;
    const uint64_t clusters = cluster ? uint64_t(grid.x / cluster) * grid.y * grid.z : 0;
    auto require = [&](bool good, const char* what) {
      if (!good) throw Error("cudasim: " + std::string(which.name) + ": cannot launch " + what);
    };
    require(self == &outside, "from a kernel");
    require(grid.x && grid.y && grid.z && size, "an empty grid or block");
    require(grid.x < 1u << 31 && grid.y < 1 << 16 && grid.z < 1 << 16, "a grid beyond (2^31-1, 65535, 65535)");
    require(size <= 1024 && block.z <= 64, "a block of more than 1024 threads, or 64 in z");
    require(cluster == 1 || device().clusters, "clusters on this device");
    require(cluster && cluster <= 8 && grid.x % cluster == 0,
            "clusters that are not 1 to 8 blocks, a divisor of grid.x");
    check_shared(which, dynamic_bytes);
    if (const char* file = std::getenv("CUDASIM_DRY")) return note_launch(file, cluster, grid, block, dynamic_bytes);
    if (watcher) watcher->launch_begins(which.name, grid, block, dynamic_bytes);
    const char* text = std::getenv("CUDASIM_SEED");
    seed = text ? std::strtoul(text, nullptr, 10) : 0;
    random.seed(unsigned(seed));
    body = std::move(call), gridDim = grid, blockDim = block, threads = unsigned(size);
    outside.stack = nullptr;  // not known yet
    const uint64_t together = seed < 2 ? 1 : crowded() ? kCrowd : 2 + (seed - 2) % 4;
    const uint64_t at_once = std::max<uint64_t>(std::min<uint64_t>(together, kMostThreads / threads) / cluster, 1);
    size_t pools_needed = at_once * cluster;
#ifdef __SANITIZE_THREAD__
    outside.tsan = __tsan_get_current_fiber();
    ++pools_needed;  // so that a block's threads are not those of the block before
#endif
    while (pools.size() < pools_needed) idle.push_back(&pools.emplace_back());
    std::vector<uint64_t> shuffled(seed > 1 ? clusters : 0);
    for (uint64_t i = 0; i < shuffled.size(); ++i) shuffled[i] = i;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    variables.find();
    happens_before(&order[0]);
    to_start = clusters;
    while (error.empty() && (to_start || !resident.empty())) {
      for (; to_start && resident.size() < at_once; --to_start) {
        const uint64_t c = seed == 0 ? clusters - to_start : seed == 1 ? to_start - 1 : shuffled[to_start - 1];
        const unsigned in_x = grid.x / cluster;
        start({unsigned(c % in_x) * cluster, unsigned(c / in_x % grid.y), unsigned(c / in_x / grid.y)}, cluster,
              dynamic_bytes);
      }
      ended = false, changed();
      resume_another();
      std::erase_if(resident, [&](auto& x) { return !x->live && (leave(*x), true); });
    }
    happens_after(&order[1]);
    if (watcher) watcher->launch_ends();
    for (auto& c : resident) {  // left unfinished after an error
      for (Block& b : c->blocks) {
        for (auto& f : *b.fibers) {
          f.tsan = nullptr;
#ifdef __SANITIZE_ADDRESS__
          __asan_unpoison_memory_region(f.stack, f.bytes);
#endif
        }
      }
      leave(*c);
    }
    resident.clear(), ready.clear(), starved.clear();
    if (!error.empty()) throw Error(error);
    which.known = true;
    check_shared(which, dynamic_bytes);  // again, with what is known by now
  }

  void* dynamic_shared() {
    const Hushed hushed;
    return block->dynamic_shared.get();
  }

  // The address of a variable in the current block.
  CUDASIM_RAW void* address(size_t number) {
    const Hushed hushed;
    Memory& memory = block->variables[number];
    if (!memory) make_variable(number);
    return memory.get();
  }
  __attribute__((noinline)) void make_variable(size_t number) {
    Quiet quiet;
    block->variables[number] = shared_memory(variables.sizes[number]);
    if (watcher) watcher->has_shared(block, block->variables[number].get(), variables.sizes[number]);
    if (kernel->uses.insert(number).second) kernel->static_bytes += variables.sizes[number];
  }
};
inline Sim sim;

[[noreturn]] CUDASIM_RAW inline void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom;  // of the stack that was left
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!sim.outside.stack) sim.outside.stack = static_cast<char*>(const_cast<void*>(bottom)), sim.outside.bytes = bytes;
#endif
  if (sim.self->quiet) Quiet::end();  // its last block left it quiet
  happens_after(&sim.order[0]);
  sim.body();
  happens_before(&sim.order[1]);
  Quiet::begin();
  if (watcher) watcher->thread_ends();
  Block& block = *sim.block;
  if (block.live == 1 && block.seen_at && block.seen_at == block.cluster->barrier.generation)
    sim.fail("its block returns while another may still read its shared memory: no cluster_sync() since");
  if (!--block.live) {
    if (watcher) watcher->block_ends(&block);
    if (!--block.cluster->live) sim.ended = true;
  }
  sim.self->state = Fiber::Done, sim.self->quiet = true, sim.changed();
  sim.resume_another();
  __builtin_unreachable();
}

// Whether CUDASIM_FAULT selects this planted fault (tests/cuda/faults.py). The check is no kernel access, so no
// sanitizer sees it.
inline const int chosen_fault = std::getenv("CUDASIM_FAULT") ? std::atoi(std::getenv("CUDASIM_FAULT")) : 0;
__attribute__((noinline, no_sanitize("thread", "address"))) inline bool fault(int number) {
  return number == chosen_fault;
}

inline void zero(void* memory, size_t bytes) {  // a memset in stream order
  if (std::getenv("CUDASIM_DRY")) return;
  if (watcher) watcher->filled(memory, bytes);
  std::memset(memory, 0, bytes);
}

// Calls work() for a test in another language. Returns null, or the error's text.
template <class Work>
const char* guarded(Work work) {
  static std::string text;
  try {
    return work(), nullptr;
  } catch (const std::exception& e) {
    return (text = e.what()).c_str();
  }
}
}  // namespace cudasim

// The function that compiled code calls for the address of a thread_local variable.
extern "C" __attribute__((used)) CUDASIM_RAW inline void* __tls_get_addr(cudasim::Asked* asked) {
  using cudasim::sim, cudasim::variables;
  if (variables.finding) variables.module = asked->module;
  if (asked->module == variables.module && sim.block && asked->offset < variables.numbers.size() &&
      variables.numbers[asked->offset] != uint16_t(-1))
    return sim.address(variables.numbers[asked->offset]);
  static const auto real = reinterpret_cast<void* (*)(cudasim::Asked*)>(dlsym(RTLD_NEXT, "__tls_get_addr"));
  return real(asked);
}

namespace cudasim {
// A launch with the GPU's checks. The caller handles allow_dynamic_shared_memory().
template <auto K, class... Args>
void start_kernel(unsigned cluster, dim3 grid, dim3 block, size_t dynamic_bytes, cudaStream_t, Args... args) {
  const auto call = [&] { K(args...); };
  sim.run(kernel<K>, cluster, grid, block, dynamic_bytes, std::cref(call));  // on the stack, as args are
}
}  // namespace cudasim

#include "cudasim_cluster.h"
#include "cudasim_device.h"
#pragma GCC visibility pop
