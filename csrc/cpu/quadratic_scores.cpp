#include "../ops/quadratic_scores.h"

#include "isa.h"

KVOPS_LEVELS(quadratic_scores, QuadraticScoresParams)
