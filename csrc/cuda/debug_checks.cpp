// kvops_debug_checks(on): sets this library's switch (check.h) and returns the old value. Called by
// kvops.debug_checks().
#include <utility>

#include "../check.h"

extern "C" __attribute__((visibility("default"))) bool kvops_debug_checks(bool on) {
  return std::exchange(kvops::debug_checks(), on);
}
