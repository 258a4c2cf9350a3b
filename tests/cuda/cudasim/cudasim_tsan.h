// The functions that compiled code calls under -fsanitize=thread, for our own runtimes in place of ThreadSanitizer's.
//
// Before including this, define: Lane, a thread (one of the simulator's fibers, or the host's) with an int `muted`;
// Lane* current, the running one; on_access(kind, p, bytes, from), called before an unmuted access by `current`, from
// code address `from`; and on_switch(lane), called before that lane runs. After it, define __tsan_func_entry() and
// __tsan_func_exit().
#pragma once

extern "C" {
#define CUDASIM_PLAIN(name, kind, bytes)                                                                    \
  void __tsan_##name(void* p) {                                                                             \
    if (!current->muted)                                                                                    \
      on_access(cudasim::Access::kind, p, bytes, reinterpret_cast<uintptr_t>(__builtin_return_address(0))); \
  }
#define CUDASIM_BOTH(prefix, bytes)               \
  CUDASIM_PLAIN(prefix##read##bytes, Read, bytes) \
  CUDASIM_PLAIN(prefix##write##bytes, Write, bytes)
CUDASIM_BOTH(, 1)
CUDASIM_BOTH(, 2)
CUDASIM_BOTH(, 4)
CUDASIM_BOTH(, 8)
CUDASIM_BOTH(, 16)
CUDASIM_BOTH(unaligned_, 2)
CUDASIM_BOTH(unaligned_, 4)
CUDASIM_BOTH(unaligned_, 8)
CUDASIM_BOTH(unaligned_, 16)
CUDASIM_BOTH(volatile_, 1)
CUDASIM_BOTH(volatile_, 2)
CUDASIM_BOTH(volatile_, 4)
CUDASIM_BOTH(volatile_, 8)
CUDASIM_BOTH(volatile_, 16)
void __tsan_read_range(void* p, size_t bytes) {
  if (!current->muted)
    on_access(cudasim::Access::Read, p, bytes, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}
void __tsan_write_range(void* p, size_t bytes) {
  if (!current->muted)
    on_access(cudasim::Access::Write, p, bytes, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

// Threads are the simulator's fibers. Quiet::begin() mutes one while it runs simulator code.
void* __tsan_get_current_fiber() { return current; }
void* __tsan_create_fiber(unsigned) { return new Lane; }
void __tsan_switch_to_fiber(void* fiber, unsigned) {
  on_switch(*static_cast<Lane*>(fiber));
  current = static_cast<Lane*>(fiber);
}
void AnnotateIgnoreReadsBegin(const char*, int) { ++current->muted; }
void AnnotateIgnoreReadsEnd(const char*, int) { --current->muted; }
void AnnotateIgnoreWritesBegin(const char*, int) {}
void AnnotateIgnoreWritesEnd(const char*, int) {}

void __tsan_init() {}
void __tsan_acquire(void*) {}
void __tsan_release(void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

// Atomics come from the simulator, which reports them itself, and from the host.
#define CUDASIM_SEQ __ATOMIC_SEQ_CST
#define CUDASIM_ATOMICS(bits, T)                                                                               \
  T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, CUDASIM_SEQ); }           \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, CUDASIM_SEQ); }           \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) { return __atomic_exchange_n(p, v, CUDASIM_SEQ); } \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) { return __atomic_fetch_add(p, v, CUDASIM_SEQ); } \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) { return __atomic_fetch_sub(p, v, CUDASIM_SEQ); } \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) { return __atomic_fetch_and(p, v, CUDASIM_SEQ); } \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) { return __atomic_fetch_or(p, v, CUDASIM_SEQ); }   \
  T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) { return __atomic_fetch_xor(p, v, CUDASIM_SEQ); } \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* old, T v, int, int) {                   \
    return __atomic_compare_exchange_n(p, old, v, false, CUDASIM_SEQ, CUDASIM_SEQ);                            \
  }                                                                                                            \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* old, T v, int, int) {                     \
    return __atomic_compare_exchange_n(p, old, v, true, CUDASIM_SEQ, CUDASIM_SEQ);                             \
  }
CUDASIM_ATOMICS(8, uint8_t)
CUDASIM_ATOMICS(16, uint16_t)
CUDASIM_ATOMICS(32, uint32_t)
CUDASIM_ATOMICS(64, uint64_t)
}
