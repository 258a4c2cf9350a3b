// ladder_gather: takes the parameters of ladder.h.
#pragma once
#include "ladder.h"

namespace kvops {

void launch_ladder_gather(const LadderParams& p, Call& call);

}  // namespace kvops
