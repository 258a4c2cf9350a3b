// The namespace of the operators, KVOPS_NAMESPACE of CMakeLists.txt: the only object that depends on it.
#include "registry.h"

const char kvops::kNamespace[] = KVOPS_NAMESPACE;
