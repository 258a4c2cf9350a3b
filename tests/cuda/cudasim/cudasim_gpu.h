// The properties of the simulated GPU, and the limits of a launch.
#pragma once

namespace cudasim {

struct Device {
  const char* name;
  int multiprocessors;
  size_t shared_memory;  // that a block may have, static and dynamic together
  size_t l2;
  bool clusters;
};

// The device that CUDASIM_DEVICE names, read again at each call. h200/8: with an eighth of its multiprocessors and L2.
inline Device device() {
  static constexpr Device kDevices[] = {
      {"small", 4, 99 << 10, 1 << 20, true},    // small tests fill more than one wave; the least shared memory
      {"hopper", 4, 227 << 10, 1 << 20, true},  // as small, for the kernels of sm90
      {"a100", 108, 163 << 10, 40 << 20, false},  {"h200", 132, 227 << 10, 50 << 20, true},
      {"b200", 148, 227 << 10, 126 << 20, true},  {"rtx3090", 82, 99 << 10, 6 << 20, false},
      {"rtx5090", 170, 99 << 10, 96 << 20, true},
  };
  const char* const wanted = std::getenv("CUDASIM_DEVICE");
  if (!wanted) return kDevices[0];
  const char* const slash = std::strchr(wanted, '/');
  const int parts = slash ? std::max(std::atoi(slash + 1), 1) : 1;
  for (Device device : kDevices) {
    if (std::string_view(wanted, slash ? slash - wanted : std::strlen(wanted)) != device.name) continue;
    device.multiprocessors = std::max(device.multiprocessors / parts, 1), device.l2 /= parts;
    return device;
  }
  throw Error(std::string("cudasim: CUDASIM_DEVICE is ") + wanted +
              ", not small, hopper, a100, h200, b200, rtx3090 or rtx5090");
}

constexpr size_t kFreeShared = 48 << 10;  // static and dynamic shared memory that a launch may have without opting in

struct Kernel {  // what is known about a kernel
  std::string_view name;
  size_t allowed = 0;       // bytes of dynamic shared memory that it may have beyond 48 KiB in all
  std::set<size_t> uses{};  // the __shared__ variables that its launches have touched
  size_t static_bytes = 0;  // of those
  bool known = false;       // it has run
};

template <auto K>
std::string_view name() {
  const std::string_view text = __PRETTY_FUNCTION__, before = "K = ";
  const size_t from = text.find(before) + before.size();
  return text.substr(from, text.find_first_of(";]", from) - from);
}
template <auto K>
inline Kernel kernel{name<K>()};

// Stands in for cudaFuncGetAttributes(). Only a launch shows what a kernel uses; before that, assume the maximum.
template <auto K>
size_t static_shared_memory() {
  return kernel<K>.known ? kernel<K>.static_bytes : kFreeShared;
}

// Stands in for cudaFuncSetAttribute() with cudaFuncAttributeMaxDynamicSharedMemorySize.
template <auto K>
void allow_dynamic_shared_memory(size_t bytes) {
  kernel<K>.allowed = bytes;
}

// Throws unless CUDA would launch the kernel with this many bytes.
inline void check_shared(const Kernel& kernel, size_t dynamic_bytes) {
  const size_t all = kernel.static_bytes + dynamic_bytes;
  const std::string what = "cudasim: " + std::string(kernel.name) + ": cannot launch with " + std::to_string(all) +
                           " bytes of shared memory, " + std::to_string(kernel.static_bytes) + " of them static: ";
  if (all > device().shared_memory) throw Error(what + "more than a block may have on " + device().name);
  if (all > kFreeShared && dynamic_bytes > kernel.allowed) throw Error(what + "more than 48 KiB must be allowed");
}
}  // namespace cudasim
