"""Each row of a padded batch keeps the tokens that it keeps alone, under every policy of `kvops.METHODS`."""

from dataclasses import fields, replace

import pytest
import torch
from torch.nn.functional import pad

import kit
import kvops
from test_policies import POLICIES

pytestmark = kit.every_device

ROWS, N, TURN, LAYERS = (64, 45, 33), 64, 20, 4
#: Prompts on both sides of the lengths at which the layers' budgets begin to differ.
PYRAMIDS = {f"pyramidkv-{x}": kvops.PyramidKV(x, window=4) for x in (22, 24, 28, 40)}
POLICIES = POLICIES | PYRAMIDS
FRACTIONS = {
    f"{name}-fraction": replace(x, budget=0.375)
    for name, x in POLICIES.items()
    if "budget" in {y.name for y in fields(x)}
}
#: `LaCache.compress` has no starts or lengths: its plan is a list of slots on the host, one for all rows.
ONE_SHOT = {name: x for name, x in (POLICIES | FRACTIONS).items() if not isinstance(x, kvops.LaCache)}
#: LAQ and KVzip evict in a stage of their own (test_hf_compress.py, test_kvzip.py). With `fixed_budget`, all rows of a
#: cache have equally many slots, so a fraction counts the columns of the batch (docs/methods.md, "Limits").
CACHED = {
    name: x
    for name, x in (POLICIES | FRACTIONS).items()
    if not x.needs.stage and not (name in FRACTIONS and x.fixed_budget)
}


def inputs(n: int, seed: int) -> tuple[torch.Tensor, ...]:
    k, v = kit.kv(len(ROWS), 2, n, 16, dv=8, seed=seed)
    return kit.randn(len(ROWS), 4, n, 16, seed=seed + 1), k, v


def queries(policy: kvops.Policy, q: torch.Tensor, n: int) -> tuple[tuple, dict]:
    """Return the arguments of `compress` after k and v. q: the queries of n tokens, last of q's rows."""
    if isinstance(policy, kvops.KVzip):
        given = dict(hidden_repeat=q[:, 0, :n] - 1) if policy.plus else {}
        if policy.gradients:
            given = dict(gradients_repeat=q[:, 0, :n, 0].abs())
        return (q[:, :, :n],), dict(k_repeat=q[:, ::2, :n] + 1, **given)
    if isinstance(policy, kvops.AttentionMatching):
        return (q[:, :, :30],), {}
    if isinstance(policy, kvops.KVzap):
        return (q[:, 0],), {}
    if isinstance(policy, kvops.LAQ):
        window = dict(q_window=q[:, :, -policy.window :]) if policy.window else {}
        return (q[:, :, -5:] + 1,), window
    if not isinstance(policy, kvops.QueryPolicy):
        return (), {}
    return (q if isinstance(policy, kvops.H2O) else q[:, :, -policy.window :],), {}


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("firsts", [(0, 19, 31), (0, 0, 0), (0, 8, 20)], ids=["left", "right", "both"])
@pytest.mark.parametrize("policy", ONE_SHOT.values(), ids=ONE_SHOT)
def test_one_shot(policy, firsts, layer):
    (q, k, v), at = inputs(N, seed=layer), dict(layer=layer, num_layers=LAYERS)
    inside = torch.stack([(torch.arange(N) >= s) & (torch.arange(N) < s + n) for s, n in zip(firsts, ROWS)])
    padded = (x.masked_fill(~inside[:, None, :, None], torch.nan) for x in (k, v))
    rows = [slice(s, s + n) for s, n in zip(firsts, ROWS)]
    own = q  # all rows of the queries of H2O and of second readings
    if not isinstance(policy, (kvops.H2O, kvops.RepeatPolicy, kvops.KVzap)):  # the queries of each row's last tokens
        own = torch.stack([pad(q[i, :, row], (0, 0, N - n, 0)) for i, (row, n) in enumerate(zip(rows, ROWS))])
    given, options = queries(policy, own, N)
    spans = dict(starts=kit.int32(*firsts), lengths=kit.int32(*ROWS))
    together = policy.compress(*padded, *given, **options, **spans, **at).indices
    for i, (row, n) in enumerate(zip(rows, ROWS)):
        given, options = queries(
            policy, q[i : i + 1] if isinstance(policy, kvops.RepeatPolicy) else q[i : i + 1, :, row], n
        )
        alone = policy.compress(k[i : i + 1, :, row], v[i : i + 1, :, row], *given, **options, **at).indices
        for found, expected in zip(together[i], alone[0]):
            assert torch.equal(found[found >= 0] - row.start, expected[expected >= 0])


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("policy", CACHED.values(), ids=CACHED)
def test_cache(policy, layer):
    """A prompt and a further turn, which all rows have."""
    pads = torch.tensor([N - n for n in ROWS])
    together, *alone = (kvops.Cache(policy, layer=layer, num_layers=LAYERS) for _ in range(1 + len(ROWS)))
    together.set_pads(pads)
    for first, n in ((pads.tolist(), N), ([0] * len(ROWS), TURN)):
        q, k, v = inputs(n, seed=n)
        outside = (torch.arange(n) < torch.tensor(first)[:, None])[:, None, :, None]
        inputs_of = [kvops.LayerInputs(q[i : i + 1, 0, start:]) for i, start in enumerate(first)]
        every = kvops.LayerInputs(q[:, 0].masked_fill(outside[:, 0], torch.nan))
        out = together.attend(*(x.masked_fill(outside, torch.nan) for x in (q, k, v)), inputs=every)
        for i, (start, cache) in enumerate(zip(first, alone)):
            expected = cache.attend(*(x[i : i + 1, :, start:] for x in (q, k, v)), inputs=inputs_of[i])
            torch.testing.assert_close(out[i, :, start:], expected[0])
            left = int(together.pads[i]) if together.pads is not None else 0
            assert torch.equal(together.positions[i, :, left:] - pads[i], cache.positions[0])
            assert kit.same((together.k[i, :, left:], together.v[i, :, left:]), (cache.k[0], cache.v[0]))
