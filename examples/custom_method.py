"""Write an eviction method of your own: a dataclass with one rule.

The policy then works in single calls, in caches, in models and in `python -m kvops.eval`:

    python -m kvops.eval --quick --methods keydiff examples/custom_method.py:ValueNorm
"""

from dataclasses import KW_ONLY, dataclass

import torch

import kvops


@dataclass(frozen=True, eq=False)
class ValueNorm(kvops.KeyPolicy):
    """Keep the tokens with the longest values: score = ||v|| / ||k||^power.

    Attributes:
        power: 0 ignores the keys.
    """

    _: KW_ONLY
    power: float = 0.0

    def check(self) -> None:
        if not self.power >= 0:
            raise ValueError(f"{self.name}: expected power >= 0, got {self.power}")
        super().check()

    def scores(self, view: kvops.View) -> torch.Tensor:
        k, v = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (view.k, view.v))
        return v / k**self.power  # fp32 [b, Hk, n]; the highest scores stay


def main() -> int:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 4, 2048, 64)
    policy = ValueNorm(256, sinks=4, recent=0.25, power=0.5)
    kept = policy.compress(k, v)
    print(f"kept {kept.k.shape[2]} of {k.shape[2]} tokens, the first ones: {kept.indices[0, 0, :6].tolist()}")

    cache = kvops.Cache(policy)
    for chunk in zip(k.split(512, 2), v.split(512, 2)):
        cache.append(*chunk)
    return len(cache)


if __name__ == "__main__":
    main()
