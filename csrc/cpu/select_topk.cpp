#include "../ops/select_topk.h"

#include "isa.h"

KVOPS_LEVELS(select_topk, SelectTopkParams)
