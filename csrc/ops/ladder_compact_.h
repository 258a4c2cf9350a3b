// ladder_compact_: the parameters are ladder.h's.
#pragma once
#include "ladder.h"

namespace kvops {

void launch_ladder_compact_(const LadderParams& p, Call& call);

}  // namespace kvops
