#include "../ops/compact_kv_.h"

#include "isa.h"

KVOPS_LEVELS(compact_kv_, CompactKVParams)
