#include "../ops/drop_scores.h"

#include "isa.h"

KVOPS_LEVELS(drop_scores, DropScoresParams)
