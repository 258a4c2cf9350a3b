#include "../ops/window_scores.h"

#include "isa.h"

KVOPS_LEVELS(window_scores, WindowScoresParams)
