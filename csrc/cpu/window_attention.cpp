#include "../ops/window_attention.h"

#include "isa.h"

KVOPS_LEVELS(window_attention, WindowAttentionParams)
