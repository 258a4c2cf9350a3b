"""When the requests of an engine are evicted, and how many slots they hold.

Both depend on a request's own tokens alone: never on scores, on the other requests, or on how the engine divides the
tokens into steps. Scheduler and workers, even in different processes, therefore count the same slots without a message,
and a request's answer does not depend on the load.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..methods.base import Policy


@dataclass(frozen=True)
class Schedule:
    """A policy, and when it evicts from a prompt.

    Attributes:
        policy: The policy. In decode it evicts at the token counts at which `policy.held` drops.
        block: Tokens of a prompt between two evictions. None: a prompt is evicted once, at its end.
    """

    policy: Policy
    block: int | None = None

    @classmethod
    def of(cls, who: str, policy: Policy, evict: str) -> Schedule:
        """Return the schedule that `evict` names: "prompt", or "blocks:N".

        Args:
            who: The function that error messages name.
            policy: The policy.
            evict: "prompt": a prompt is evicted once, at its end. "blocks:N": after every N of its tokens, and at its
                end.

        Raises:
            TypeError: `evict` is not a string.
            ValueError: `evict` is neither.
        """
        if not isinstance(evict, str):
            raise TypeError(f"{who}: evict must be a str, 'prompt' or 'blocks:N', got {type(evict).__name__} {evict!r}")
        kind, _, tokens = evict.partition(":")
        if evict == "prompt":
            return cls(policy)
        if kind != "blocks" or not (tokens.isascii() and tokens.isdecimal()) or int(tokens) < 1:
            raise ValueError(f"{who}: evict must be 'prompt' or 'blocks:N' with N >= 1 tokens, got {evict!r}")
        return cls(policy, int(tokens))

    @property
    def evict(self) -> str:
        """The schedule's name, as `of` takes it."""
        return "prompt" if self.block is None else f"blocks:{self.block}"

    def held(self, n: int, prompt: int) -> int:
        """Return the slots that a request holds after n tokens, `prompt` of them its prompt."""
        if n >= prompt or self.block is None:
            return self.policy.held(n, prompt)
        last = self.last(n, prompt)
        return self.policy.held(last, last) + n - last

    def most(self, prompt: int) -> int:
        """Return the most slots that a request holds until its prompt has been evicted."""
        block = self.block or max(1, prompt)
        return max((self.held(n, prompt) + min(block, prompt - n) for n in range(0, prompt, block)), default=0)

    def last(self, n: int, prompt: int) -> int:
        """Return after how many of n tokens a request was last evicted, if it was due. 0: it never was."""
        if n >= prompt:
            return n
        return 0 if self.block is None else n - n % self.block

    def cut(self, before: int, new: int, prompt: int) -> int:
        """Return how many of a request's `new` next tokens a step may take: none after an eviction.

        Args:
            before: The tokens computed before the step.
            new: The tokens that the engine would take.
            prompt: The tokens of the prompt.
        """
        if before < prompt:
            end = prompt if self.block is None else min(prompt, before - before % self.block + self.block)
            return min(new, end - before)
        held = self.policy.held(before, prompt)
        return next((t for t in range(1, new) if self.policy.held(before + t, prompt) < held + t), new)

    def rule(self, before: int, n: int, prompt: int) -> Policy:
        """Return the policy whose `select` performs the eviction due after n tokens.

        Its input is the slots held after `before` tokens, and the tokens since. It keeps held(n, prompt) of them.
        """
        return self.policy.resumed(self.last(before, prompt), n, min(n, prompt))
