#include "../ops/outlier_degree.h"

#include "isa.h"

KVOPS_LEVELS(outlier_degree, OutlierDegreeParams)
