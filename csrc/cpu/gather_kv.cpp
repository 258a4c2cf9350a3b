#include "../ops/gather_kv.h"

#include "isa.h"

KVOPS_LEVELS(gather_kv, GatherKVParams)
