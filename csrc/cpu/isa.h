// The instruction-set levels of the CPU kernels. Each kernel body cpu/<op>.h is compiled once per level into namespace
// kvops::<level>. cpu/<op>.cpp, compiled for the baseline, calls the best level of this machine (or the one that
// KVOPS_ISA names).
//
// x86-64 has v2 (SSE4.2), v3 (AVX2, FMA, F16C), v4 (AVX-512), v4_bf16 (with AVX512-BF16) and v4_amx (with AMX), which
// is the code of v4_bf16 and uses tiles (tiles.h). aarch64 has neon and neon_bf16 (with BFDOT and BFMMLA). Other
// processors have `baseline`, plain vectors. CMake writes levels.h: KVOPS_EACH_LEVEL(X, ...) is X(level, ...) for each
// level of this build, lowest first; KVOPS_EACH_BODY leaves out v4_amx; KVOPS_LEVEL_LIST is their names.
#pragma once

#include <string_view>

#include "../call.h"
#include "levels.h"

namespace kvops {

namespace v4_bf16 {}
namespace v4_amx = v4_bf16;

#define KVOPS_ENUMERATOR(level, ...) level,
enum class Isa { KVOPS_EACH_LEVEL(KVOPS_ENUMERATOR, ) };

#define KVOPS_DECLARATION(level, op, Params) \
  namespace level {                          \
  void op(const Params&, Call&);             \
  }
#define KVOPS_CASE(level, op) \
  case Isa::level:            \
    return level::op(p, call);

// Defines launch_<op>, which calls `void op(const Params&, Call&)` of the level in use.
#define KVOPS_LEVELS(op, Params)                        \
  namespace kvops {                                     \
  KVOPS_EACH_BODY(KVOPS_DECLARATION, op, Params)        \
  void launch_##op(const Params& p, Call& call) {       \
    switch (isa()) { KVOPS_EACH_LEVEL(KVOPS_CASE, op) } \
  }                                                     \
  }

// The level in use. Throws std::invalid_argument if KVOPS_ISA names another level than those of this build, or if this
// CPU lacks the level.
Isa isa();

// Its name.
std::string_view isa_name();

}  // namespace kvops
