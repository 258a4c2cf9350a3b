#include "../ops/cluster_priority.h"

#include "isa.h"

KVOPS_LEVELS(cluster_priority, ClusterPriorityParams)
