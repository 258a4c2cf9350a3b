#include "../ops/value_range.h"

#include "isa.h"

KVOPS_LEVELS(value_range, ValueRangeParams)
