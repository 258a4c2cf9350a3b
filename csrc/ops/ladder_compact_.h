// ladder_compact_: takes the parameters of ladder.h.
#pragma once
#include "ladder.h"

namespace kvops {

void launch_ladder_compact_(const LadderParams& p, Call& call);

}  // namespace kvops
