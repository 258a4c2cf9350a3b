#include "../ops/trig_scores.h"

#include "isa.h"

KVOPS_LEVELS(trig_scores, TrigScoresParams)
