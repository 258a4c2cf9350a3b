#include "../ops/value_norm.h"

#include "isa.h"

KVOPS_LEVELS(value_norm, ValueNormParams)
