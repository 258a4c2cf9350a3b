"""Which requests a step has, and how many tokens their prompts have. The worker's metadata builders are not told.

vLLM tells logits processors of every request that joins the batch. `Prompts` is one, found through its entry point,
that leaves the logits as they are. It implements the interfaces of both model runners of vLLM, which share `apply`
alone. It changes nothing in an engine without a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2
except ImportError:  # vLLM loads this module without a policy, too. With one, `check_vllm` refuses such a version.
    LogitsProcessorV2 = object

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.sample.logits_processor import BatchUpdate

_NONE = 2**40  # the prompt of a row without a request, which is therefore never evicted
_NOBODY: tuple[int, object] = _NONE, None


class Prompts(LogitsProcessor, LogitsProcessorV2):
    """The requests in the batch of this process, and the lengths of their prompts."""

    #: The one of the engine that this process runs.
    current: ClassVar[Prompts | None] = None

    def __init__(self, vllm_config: Any, *of_runner: Any):
        #: Of the V2 runner: its requests' states. The V1 runner passes the device and whether memory is pinned.
        self._states = of_runner[0] if len(of_runner) == 1 else None
        self._requests: dict[int, object] = {}  # of the V2 runner, by their places among its states
        self._rows: list[tuple[int, object]] = []  # of the V1 runner, by row of its batch: prompt and request
        Prompts.current = self

    def by_row(self, metadata: CommonAttentionMetadata) -> tuple[Sequence[int], Sequence[object]]:
        """Return, for each row of a step, the tokens of its prompt, and an object that is its request's in each step.

        A row without a request has None.
        """
        count = metadata.num_reqs
        if self._states is not None:
            if metadata.req_idx is None:
                raise NotImplementedError(
                    "kvops.vllm: expected the model runner to name each row's request (req_idx), got none; set "
                    "VLLM_USE_V2_MODEL_RUNNER=0"
                )
            known = self._states.prompt_len.np[metadata.req_idx].tolist()
            rows = [(x, self._requests.setdefault(int(i), object())) for x, i in zip(known, metadata.req_idx)]
        else:
            rows = self._rows
        rows = [*rows, *[_NOBODY] * count][:count]
        return [x for x, _ in rows], [x for _, x in rows]

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows[row] = _NOBODY
        for row, _, prompt, generated in batch_update.added:
            if prompt is None:
                raise NotImplementedError(
                    "kvops.vllm: expected prompts of token ids, got a prompt of embeddings, whose length is not known"
                )
            rows += [_NOBODY] * (row + 1 - len(rows))
            rows[row] = len(prompt), generated  # the list of one request, also when it leaves the batch and returns
        for source, dest, direction in batch_update.moved:
            rows += [_NOBODY] * (max(source, dest) + 1 - len(rows))
            back = rows[dest] if direction == MoveDirectionality.SWAP else _NOBODY
            rows[dest], rows[source] = rows[source], back

    def is_argmax_invariant(self) -> bool:
        return True

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._requests[req_idx] = object()
        return False

    def apply(self, logits: Tensor, *context: Any) -> Tensor:
        return logits
