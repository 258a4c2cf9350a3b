"""The model "kvops" of lm-eval-harness: its tasks, with a cache that evicts.

    python -m kvops.eval.harness run --model kvops --model_args pretrained=FOLDER policy=keydiff:budget=1024 --tasks ...

Importing this module registers the model, so `lm_eval.simple_evaluate(model="kvops", ...)` works too. The harness has
no entry points for models, so its own command `lm_eval` does not find it.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..hf import compress, for_model
from ..methods import Policy
from ..methods.registry import find
from ..methods.registry import policy as policy_of
from .methods import rule_of
from .reader import Reader

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ImportError as error:
    WHY = f"kvops.eval.harness: expected lm-eval-harness, got {error}: pip install 'lm_eval[hf]'"
    if __name__ == "__main__":
        sys.exit(WHY)
    raise ImportError(WHY) from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Scored = tuple[tuple[str, str], list[int], list[int]]  # texts and tokens of a context and its continuation


@register_model("kvops")
class KVopsLM(HFLM):
    """A causal language model of transformers, whose cache evicts by a policy.

    - `generate_until`: the cache evicts as in `kvops.hf.compress`, in the prompt and in the answer.
    - `loglikelihood`: the context is read and evicted from; then the continuation is scored. Requests are run one at a
      time, and those with the same context share it.
    - `loglikelihood_rolling` raises, because it has no context that could be evicted from before the scores. The task
      `perplexity` of `python -m kvops.eval` measures streams.

    Args:
        pretrained: Folder, hub name, or a loaded model.
        policy: A policy, or a string for `kvops.policy`: "keydiff:budget=1024". As on the command line of `kvops.eval`,
            it may name a file or a module, whose code then runs.
        **settings: Those of lm-eval-harness' model "hf": `dtype`, `peft`, `max_length`, ... With a string, further
            settings of the policy: the harness splits `policy=keydiff:budget=1024,sinks=4` at the comma.
    """

    def __init__(self, pretrained: Any, policy: Policy | str, **settings: Any):
        if isinstance(policy, str):
            names = {x.name for x in fields(find(policy, allow_code=True)[0].policy)}  # type: ignore[arg-type]
            policy = policy_of(policy, allow_code=True, **{x: settings.pop(x) for x in names & settings.keys()})
        self.policy = policy
        self.rule = rule_of(self.policy)
        super().__init__(pretrained, **settings)
        if self.backend != "causal":
            raise ValueError(
                f"kvops.eval.harness: expected a causal language model, got a model that is {self.backend}"
            )

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        with compress(self.model, for_model(self.policy, self.model, self.tokenizer)):
            return super()._model_generate(*args, **kwargs)

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        reader = Reader(self.model, self.tokenizer)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: self._kept(requests[i]))
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="loglikelihood") as bar:
            for context, same in groupby(order, key=lambda i: self._kept(requests[i])):
                prefill = reader.prefill(np.array([context]), self.rule, None)
                for i in same:
                    continuation = np.array([requests[i][2]])
                    own = replace(prefill, cache=copy.deepcopy(prefill.cache))
                    scores = reader.follow(own, None, continuation)[0].log_softmax(-1, dtype=torch.float32).cpu()
                    said = torch.from_numpy(continuation[0])
                    right = scores.gather(1, said[:, None])
                    found[i] = float(right.sum()), bool((scores.argmax(-1) == said).all())
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                    bar.update()
        return found

    def _kept(self, request: Scored) -> list[int]:
        """Return the context's newest tokens that fit beside the continuation, as lm-eval-harness counts them."""
        _, context, continuation = request
        return context[-max(1, self.max_length + 1 - len(continuation)) :]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError(
            "kvops.eval.harness: expected tasks with generate_until, loglikelihood or multiple_choice, got one with "
            "loglikelihood_rolling, which scores a text without a context to evict from; python -m kvops.eval --tasks "
            "perplexity measures a text that streams through an evicting cache"
        )


if __name__ == "__main__":
    cli_evaluate()
