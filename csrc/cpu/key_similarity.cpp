#include "../ops/key_similarity.h"

#include "isa.h"

KVOPS_LEVELS(key_similarity, KeySimilarityParams)
