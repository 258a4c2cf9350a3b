#include "../ops/lag_score.h"

#include "isa.h"

KVOPS_LEVELS(lag_score, LagScoreParams)
