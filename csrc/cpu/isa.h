// The instruction-set levels of the CPU kernels. Each kernel body cpu/<op>.h is compiled once per level into namespace
// kvops::<level>. cpu/<op>.cpp, compiled for the baseline, calls the best level of this machine (or the one that
// KVOPS_ISA names).
#pragma once

#include "../call.h"

namespace kvops {

#if defined(__x86_64__)
// x86-64-v2 (SSE4.2), -v3 (AVX2, FMA, F16C), -v4 (AVX-512), and v4 with bf16 dot products (AVX512-BF16).
enum class Isa { v2, v3, v4, v4_bf16 };

// Defines launch_<op>, which calls `void op(const Params&, Call&)` of the level in use.
#define KVOPS_LEVELS(op, Params)                  \
  namespace kvops {                               \
  namespace v2 {                                  \
  void op(const Params&, Call&);                  \
  }                                               \
  namespace v3 {                                  \
  void op(const Params&, Call&);                  \
  }                                               \
  namespace v4 {                                  \
  void op(const Params&, Call&);                  \
  }                                               \
  namespace v4_bf16 {                             \
  void op(const Params&, Call&);                  \
  }                                               \
  void launch_##op(const Params& p, Call& call) { \
    switch (isa()) {                              \
      case Isa::v2:                               \
        return v2::op(p, call);                   \
      case Isa::v3:                               \
        return v3::op(p, call);                   \
      case Isa::v4:                               \
        return v4::op(p, call);                   \
      case Isa::v4_bf16:                          \
        return v4_bf16::op(p, call);              \
    }                                             \
  }                                               \
  }
#else
enum class Isa { baseline };  // NEON on Arm, plain vectors elsewhere

#define KVOPS_LEVELS(op, Params)                  \
  namespace kvops {                               \
  namespace baseline {                            \
  void op(const Params&, Call&);                  \
  }                                               \
  void launch_##op(const Params& p, Call& call) { \
    baseline::op(p, call);                        \
  }                                               \
  }
#endif

// The level in use. Throws std::invalid_argument if KVOPS_ISA names an unknown level or one that this CPU lacks.
Isa isa();

}  // namespace kvops
