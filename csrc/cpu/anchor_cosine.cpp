#include "../ops/anchor_cosine.h"

#include "isa.h"

KVOPS_LEVELS(anchor_cosine, AnchorCosineParams)
