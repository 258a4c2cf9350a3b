// cudasim_access.h: the events that the simulator reports about a kernel's run to a Watcher, such as the counters of
// cudasim_traffic.cpp.
//
// Plain loads and stores do not pass through the simulator. The compiler reports them: under -fsanitize=thread it calls
// __tsan_read4(p) and the like before each one. cudasim_traffic.cpp defines these functions in place of
// ThreadSanitizer's runtime, so the objects are the same and only the link differs.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#pragma GCC visibility push(hidden)

namespace cudasim {

// Accesses that are reported explicitly: copies that bypass registers, matrix loads, and anything beyond a plain load
// or store.
enum class Access { Read, Write, Atomic, CopyRead, CopyWrite };

struct Watcher {
  virtual void launch_begins(std::string_view /*kernel*/, dim3 /*grid*/, dim3 /*block*/, size_t /*dynamic_bytes*/) {}
  virtual void launch_ends() {}
  virtual void filled(const void* /*p*/, size_t /*bytes*/) {}  // by a memset

  // `block` identifies a block while it runs. Several may run at once.
  virtual void block_begins(const void* /*block*/, uint64_t /*index*/) {}
  virtual void has_shared(const void* /*block*/, const void* /*p*/, size_t /*bytes*/) {
  }  // its shared memory, or a part
  virtual void block_ends(const void* /*block*/) {}
  // `fiber` is the thread's handle from __tsan_create_fiber(), as later passed to __tsan_switch_to_fiber().
  virtual void thread_begins(void* /*fiber*/, const void* /*block*/, unsigned /*rank*/, const void* /*stack*/,
                             size_t /*stack_bytes*/) {}

  // About the current thread, and those it stands for.
  virtual void thread_ends() {}
  virtual void warp_meets(unsigned /*mask*/) {}  // the last of these lanes has arrived
  virtual void block_meets() {}
  virtual void access(Access, const void* /*p*/, size_t /*bytes*/) {}
  virtual void publishes() {}       // the block's stores become visible to all
  virtual void refreshes() {}       // what others have published becomes visible to the block
  virtual void fences() {}          // both, in __threadfence()
  virtual void past_l1() {}         // the next load bypasses L1
  virtual void hush(int /*by*/) {}  // 1: from here on loads and stores are the simulator's; -1: no longer
};
inline Watcher* watcher = nullptr;

// During its lifetime, the current thread's accesses are those the simulator reports through access().
struct Hushed {
  Hushed() {
    if (watcher) watcher->hush(1);
  }
  ~Hushed() {
    if (watcher) watcher->hush(-1);
  }
};
inline void told(Access kind, const void* p, size_t bytes) {
  if (watcher) watcher->access(kind, p, bytes);
}

}  // namespace cudasim
#pragma GCC visibility pop
