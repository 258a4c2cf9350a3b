// The instruction-set levels of the CPU kernels. Each kernel body cpu/<op>.h is compiled once per level into namespace
// kvops::<level>; cpu/<op>.cpp, compiled at the baseline, calls the level that this machine has (or KVOPS_ISA names).
#pragma once

#include <cstdint>

namespace kvops {

// What a body works with: torch's threads (as a pointer, since bodies include no torch header) and scratch memory.
struct Workers {
  int32_t (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
  int64_t count;     // threads
  float* workspace;  // for this call, as large as the operator's .cpp says; uninitialized
};

#if defined(__x86_64__)
// x86-64-v2 (SSE4.2), -v3 (AVX2, FMA, F16C), -v4 (AVX-512), and v4 with dot products of bf16 (AVX512-BF16).
enum class Isa { v2, v3, v4, v4_bf16 };

// Declares `void op(const Params&, const Workers&)` in every level, and op_cpu, which calls the level in use.
#define KVOPS_LEVELS(op, Params)                            \
  namespace v2 {                                            \
  void op(const Params&, const Workers&);                   \
  }                                                         \
  namespace v3 {                                            \
  void op(const Params&, const Workers&);                   \
  }                                                         \
  namespace v4 {                                            \
  void op(const Params&, const Workers&);                   \
  }                                                         \
  namespace v4_bf16 {                                       \
  void op(const Params&, const Workers&);                   \
  }                                                         \
  inline void op##_cpu(const Params& p, const Workers& w) { \
    switch (isa()) {                                        \
      case Isa::v2:                                         \
        return v2::op(p, w);                                \
      case Isa::v3:                                         \
        return v3::op(p, w);                                \
      case Isa::v4:                                         \
        return v4::op(p, w);                                \
      case Isa::v4_bf16:                                    \
        return v4_bf16::op(p, w);                           \
    }                                                       \
  }
#else
enum class Isa { baseline };  // NEON on Arm, plain vectors elsewhere

#define KVOPS_LEVELS(op, Params)                            \
  namespace baseline {                                      \
  void op(const Params&, const Workers&);                   \
  }                                                         \
  inline void op##_cpu(const Params& p, const Workers& w) { \
    return baseline::op(p, w);                              \
  }
#endif

// The level in use. Throws std::invalid_argument when KVOPS_ISA names one that is unknown or that this CPU lacks.
Isa isa();

}  // namespace kvops
