#include "../ops/assign_prototypes.h"

#include "isa.h"

KVOPS_LEVELS(assign_prototypes, AssignPrototypesParams)
