#include "../ops/build_prototypes.h"

#include "isa.h"

KVOPS_LEVELS(build_prototypes, BuildPrototypesParams)
