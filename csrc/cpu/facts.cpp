// kvops_facts(): a description of this library in JSON, for kvops.build_info().
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>

#include "isa.h"

namespace kvops {
namespace {

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
}  // namespace kvops

extern "C" __attribute__((visibility("default"))) const char* kvops_facts() {
  static const std::string facts = [] {
    std::string level, error;
    try {
      level = kvops::isa_name();
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
