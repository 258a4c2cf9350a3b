// The instruction-set level in use, and kvops_facts(): a description of this library in JSON, for kvops.build_info().
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
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
  const bool v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
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

// Turns "a,b" into the JSON list ["a", "b"].
std::string json_list(const std::string& text) {
  std::string list;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) list += (list.empty() ? "\"" : ", \"") + item + '"';
  return '[' + list + ']';
}

// Text from the environment, escaped for a JSON string.
std::string escaped(const std::string& text) {
  std::string found;
  for (const unsigned char c : text) {
    if (c >= 0x20 && c < 0x7f && c != '"' && c != '\\') {
      found += static_cast<char>(c);
      continue;
    }
    char code[7];
    std::snprintf(code, sizeof code, "\\u%04x", c);
    found += code;
  }
  return found;
}

}  // namespace

Isa isa() {
  static const Isa level = chosen_level();
  return level;
}

bool has_tiles() {
  return kNames[static_cast<int>(isa())] == "v4_amx";
}

}  // namespace kvops

extern "C" __attribute__((visibility("default"))) const char* kvops_facts() {
  static const std::string facts = [] {
    std::string level, error;
    try {
      level = kvops::kNames[static_cast<int>(kvops::isa())];
    } catch (const std::invalid_argument& wrong) {
      error = wrong.what();
    }
    std::ostringstream json;
    json << "{\"torch_build\": \"" KVOPS_TORCH_BUILD "\", \"torch_target\": \"2.10\", \"compiler\": \""
#if defined(__clang__)
         << "clang " << __clang_major__ << '.' << __clang_minor__ << '.' << __clang_patchlevel__
#else
         << "gcc " << __GNUC__ << '.' << __GNUC_MINOR__ << '.' << __GNUC_PATCHLEVEL__
#endif
         << "\", \"isa\": \"" << level << "\", \"isa_built\": " << kvops::json_list(KVOPS_LEVEL_LIST)
         << ", \"cuda\": {\"built\": " KVOPS_CUDA_BUILT ", \"archs\": " << kvops::json_list(KVOPS_CUDA_ARCHS)
         << ", \"nvcc\": \"" KVOPS_NVCC "\""
         << ", \"why\": \"" KVOPS_CUDA_WHY "\", \"sm90\": {\"built\": " KVOPS_SM90_BUILT
         << ", \"why\": \"" KVOPS_SM90_WHY "\"}}, \"error\": \"" << kvops::escaped(error) << "\"}";
    return json.str();
  }();
  return facts.c_str();
}
