// The instruction-set level in use.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif
#endif

#include "isa.h"

namespace kvops {
namespace {

#define KVOPS_NAME(level, ...) #level,
constexpr std::string_view kNames[] = {KVOPS_EACH_LEVEL(KVOPS_NAME, )};
constexpr int kLevels = static_cast<int>(std::size(kNames));

#if defined(__x86_64__)
// Whether this CPU has AMX tiles of bf16 and int8, and the system permits this process to use them. Asks it to.
bool may_use_tiles() {
#if defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr long kRequestPermission = 0x1023, kTileData = 18;   // ARCH_REQ_XCOMP_PERM, of Linux 5.16
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kNeeded) == kNeeded &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool runs(std::string_view level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
  unsigned a, b, c, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;  // a name that clang 14 does not know
  const bool v3 = v2 && f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (level == "v2") return v2;
  if (level == "v3") return v3;
  if (level == "v4") return v4;
  const bool v4_bf16 = v4 && __builtin_cpu_supports("avx512bf16");
  if (level == "v4_bf16") return v4_bf16;
  if (level == "v4_amx") return v4_bf16 && may_use_tiles();
#elif defined(__aarch64__)
  if (level == "neon") return true;
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which old headers lack
  if (level == "neon_bf16") return getauxval(AT_HWCAP2) & kBf16;
#endif
#endif
  return level == "baseline";
}

Isa chosen_level() {
  const auto best = [] {
    int level = kLevels - 1;
    while (level >= 0 && !runs(kNames[level])) --level;
    if (level < 0)
      throw std::invalid_argument("this CPU runs none of the instruction-set levels that were built (" KVOPS_LEVEL_LIST
                                  "); build kvops with KVOPS_LEVELS=all, or on this machine");
    return level;
  };
  const char* forced = std::getenv("KVOPS_ISA");
  if (!forced || !*forced) return static_cast<Isa>(best());
  for (int i = 0; i < kLevels; ++i) {
    if (forced != kNames[i]) continue;
    if (runs(kNames[i])) return static_cast<Isa>(i);
    throw std::invalid_argument(std::string("KVOPS_ISA=") + forced +
                                " is not supported by this machine, expected at most " + std::string(kNames[best()]));
  }
  throw std::invalid_argument(std::string("KVOPS_ISA must be one of " KVOPS_LEVEL_LIST ", got ") + forced);
}

}  // namespace

Isa isa() {
  static const Isa level = chosen_level();
  return level;
}

std::string_view isa_name() {
  return kNames[static_cast<int>(isa())];
}

bool has_tiles() {
  return isa_name() == "v4_amx";
}

}  // namespace kvops
