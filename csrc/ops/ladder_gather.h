// ladder_gather: the parameters are ladder.h's.
#pragma once
#include "ladder.h"

namespace kvops {

void launch_ladder_gather(const LadderParams& p, Call& call);

}  // namespace kvops
