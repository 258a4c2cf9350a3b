#include "../ops/rope_at_slots.h"

#include "isa.h"

KVOPS_LEVELS(rope_at_slots, RopeAtSlotsParams)
