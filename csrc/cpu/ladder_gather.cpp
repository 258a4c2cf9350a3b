#include "../ops/ladder_gather.h"

#include "isa.h"

KVOPS_LEVELS(ladder_gather, LadderParams)
