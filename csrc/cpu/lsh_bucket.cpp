#include "../ops/lsh_bucket.h"

#include "isa.h"

KVOPS_LEVELS(lsh_bucket, LshBucketParams)
