#include "../ops/cluster_mean.h"

#include "isa.h"

KVOPS_LEVELS(cluster_mean, ClusterMeanParams)
