#include "../ops/ladder_compact_.h"

#include "isa.h"

KVOPS_LEVELS(ladder_compact_, LadderParams)
