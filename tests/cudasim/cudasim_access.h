// cudasim_access.h: what the simulator tells of a kernel's run, to whoever watches it: cudasim_traffic.cpp counts.
//
// Plain loads and stores do not pass through the simulator. The compiler reports them: under -fsanitize=thread it calls
// __tsan_read4(p) and the like before each. cudasim_traffic.cpp defines these functions in the place of
// ThreadSanitizer's runtime, so the objects are the same and only the link differs.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#pragma GCC visibility push(hidden)

namespace cudasim {

// What is reported by name: copies that no register sees, matrices, and what is more than a load and a store.
enum class Access { Read, Write, Atomic, CopyRead, CopyWrite };

struct Watcher {
  virtual void launch_begins(std::string_view /*kernel*/, dim3 /*grid*/, dim3 /*block*/, size_t /*dynamic_bytes*/) {}
  virtual void launch_ends() {}
  virtual void filled(const void* /*p*/, size_t /*bytes*/) {}  // by a memset

  // `block` names a block while it runs. Several may run at once.
  virtual void block_begins(const void* /*block*/, uint64_t /*index*/) {}
  virtual void has_shared(const void* /*block*/, const void* /*p*/, size_t /*bytes*/) {
  }  // its shared memory, or a part
  virtual void block_ends(const void* /*block*/) {}
  // `fiber` is what __tsan_create_fiber() gave for the thread, and what __tsan_switch_to_fiber() gets.
  virtual void thread_begins(void* /*fiber*/, const void* /*block*/, unsigned /*rank*/, const void* /*stack*/,
                             size_t /*stack_bytes*/) {}

  // Of the current thread, and of those it stands for.
  virtual void thread_ends() {}
  virtual void warp_meets(unsigned /*mask*/) {}  // the last of these lanes has come
  virtual void block_meets() {}
  virtual void access(Access, const void* /*p*/, size_t /*bytes*/) {}
  virtual void publishes() {}       // what its block has stored is there for all
  virtual void refreshes() {}       // what others have published is there for its block
  virtual void fences() {}          // both, in __threadfence()
  virtual void past_l1() {}         // its next load asks L2
  virtual void hush(int /*by*/) {}  // 1: from here on its loads and stores are the simulator's; -1: no longer
};
inline Watcher* watcher = nullptr;

// While one lives, the current thread does what the simulator reports by access().
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
