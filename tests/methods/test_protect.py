"""protect="prompt": a cache keeps the whole prompt, and the budget is for the tokens after it."""

import copy
from dataclasses import fields, replace

import pytest
import torch

import kit
import kvops

pytestmark = kit.every_device

HEADS, GROUP, D, BUDGET = 2, 2, 16, 10
STATISTICS = kit.query_statistics(1, GROUP * HEADS, D)
OPTIONS = dict(buffer=3, protect="prompt")
CHOSEN = [
    kvops.KeyDiff(BUDGET, recent=0.25, **OPTIONS),
    kvops.KeyDiff(BUDGET, anchor="median", head_mode="shared", **OPTIONS),
    kvops.KeyDiff(BUDGET, sinks=2, recent=3, refresh=2, merge=True, **OPTIONS),
    kvops.L2(BUDGET, skip_layers=(), **OPTIONS),
    kvops.StreamingLLM(BUDGET, **OPTIONS),
    kvops.Random(BUDGET, seed=3, **OPTIONS),
    kvops.SATKV(BUDGET, window=4, kappa=2, **OPTIONS),
    kvops.RKV(BUDGET, window=4, **OPTIONS),
    kvops.VaSE(BUDGET, window=4, sinks=2, largest_values=0.3, **OPTIONS),
    kvops.TOVA(BUDGET, **OPTIONS),
    kvops.H2O(BUDGET, recent=0.5, **OPTIONS),
    kvops.ProtoKV(BUDGET, window=5, alpha=4, num_chunks=4, num_sats=4, kappa=2, **OPTIONS),
    kvops.TriAttention(BUDGET, recent=4, statistics=STATISTICS, **OPTIONS),
    kvops.ExpectedAttention(BUDGET, future=8, statistics=STATISTICS, **OPTIONS),
    kvops.KVzap(BUDGET, gates=kvops.Gates([[kit.randn(HEADS, D), kit.randn(HEADS)]]), **OPTIONS),
]
DECODE = dict.fromkeys(x.policy for x in kvops.METHODS.values() if "buffer" in {y.name for y in fields(x.policy)})
OTHERS = [x(BUDGET, **OPTIONS) for x in DECODE if x not in {type(y) for y in CHOSEN}]
POLICIES = CHOSEN + OTHERS  # every policy that evicts in decode
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda x: x.name)


def tokens(n: int, b: int = 1, seed: int = 0):
    """Return q, k and v of n tokens."""
    return [kit.randn(b, heads, n, D, seed=10 * seed + i) for i, heads in enumerate((GROUP * HEADS, HEADS, HEADS))]


def feed(cache, x, steps):
    """Take the tokens x in steps of these lengths."""
    for t in steps:
        seen = cache.seen
        q, k, v = (part[:, :, seen : seen + t] for part in x)
        cache.attend(q, k, v, inputs=kvops.LayerInputs(q[:, 0]))


@every_policy
@pytest.mark.parametrize("prompt", [1, 6, 25])
def test_the_prompt_stays_and_the_budget_is_for_the_rest(policy, prompt):
    cache, x, first = kvops.Cache(policy), tokens(prompt + 61), torch.arange(prompt)
    feed(cache, x, [prompt])
    most = 0
    for n in range(prompt + 1, prompt + 62):
        feed(cache, x, [1])
        assert len(cache) == policy.held(n, prompt)
        assert (cache.positions[..., :prompt] == first).all()
        most = max(most, len(cache))
    assert most == prompt + BUDGET + 2 and len(cache) < most
    if not policy.merge:
        at = cache.positions[..., None].expand(-1, -1, -1, D)
        assert torch.equal(cache.k, x[1].gather(2, at)) and torch.equal(cache.v, x[2].gather(2, at))


@every_policy
def test_it_is_the_policy_whose_sinks_are_the_prompt(policy):
    """The prompt is in the scores, as every cached token is. Only its slots are out of reach."""
    prompt, fractions = 25, [x for x in ("recent", "largest_values") if isinstance(getattr(policy, x, 0), float)]
    options = {x: int(getattr(policy, x) * BUDGET) for x in fractions}
    sinks = replace(policy, budget=prompt + BUDGET, sinks=prompt + policy.sinks, protect=None, **options)
    x, caches = tokens(prompt + 40), [kvops.Cache(policy), kvops.Cache(sinks)]
    for cache in caches:
        feed(cache, x, [prompt, *[1] * 40])
    assert torch.equal(caches[0].positions, caches[1].positions)
    assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)


@every_policy
@pytest.mark.parametrize("steps", [[9, 8, 8], [2, 23]])
def test_a_prompt_in_chunks(policy, steps):
    x, caches = tokens(65), [kvops.Cache(policy), kvops.Cache(policy)]
    feed(caches[0], x, [25, *[1] * 40])
    feed(caches[1], x, [*steps, *[1] * 40])
    assert torch.equal(caches[0].positions, caches[1].positions)


@every_policy
def test_rows_of_a_padded_batch_are_those_alone(policy):
    """Padding belongs to the prompt: were it evicted first, padded rows would keep more generated tokens."""
    prompt, more, pads = 25, 40, [0, 7, 20]
    x, cache = tokens(prompt + more, b=3), kvops.Cache(policy)
    cache.set_pads(torch.tensor(pads))
    feed(cache, x, [prompt, *[1] * more])
    assert cache.pads.tolist() == pads
    for row, pad in enumerate(pads):
        alone = kvops.Cache(policy)
        feed(alone, [part[row : row + 1, :, pad:] for part in x], [prompt - pad, *[1] * more])
        assert torch.equal(cache.positions[row : row + 1, :, pad:] - pad, alone.positions)


def test_later_turns_count_as_generated():
    policy = kvops.Random(BUDGET, **OPTIONS)
    x, cache = tokens(60), kvops.Cache(policy)
    feed(cache, x, [20, 1, 1, 30])
    assert len(cache) == 20 + BUDGET and (cache.positions[..., :20] == torch.arange(20)).all()
    cache.reset()
    feed(cache, x, [5, *[1] * 20])  # another prompt
    assert len(cache) == policy.held(25, 5) and (cache.positions[..., :5] == torch.arange(5)).all()


def test_a_cropped_prompt_is_shorter():
    policy = kvops.KeyDiff(BUDGET, **OPTIONS)
    x, cache, other = tokens(60), kvops.Cache(policy), kvops.Cache(policy)
    feed(cache, x, [30, 1])
    cache.crop(12)
    feed(other, x, [12])
    twin = copy.copy(cache)
    for each in (cache, twin, other):
        feed(each, x, [1] * 30)
    assert torch.equal(cache.positions, other.positions) and torch.equal(twin.positions, other.positions)
    assert len(cache) == policy.held(42, 12)


def test_drafts_that_are_verified_after_the_prompt_are_not_part_of_it():
    policy = kvops.KeyDiff(BUDGET, **OPTIONS)
    x, cache, plain = tokens(60), kvops.Cache(policy), kvops.Cache(policy)
    feed(cache, x, [20])
    while cache.seen < 56:
        cache.frozen = True
        feed(cache, x, [4])  # a token and three drafted ones, of which two are rejected
        cache.crop(cache.seen - 2)
        cache.frozen = False
        cache.catch_up()
    feed(plain, x, [20, *[1] * 36])
    assert len(cache) == len(plain) and (cache.positions[..., :20] == torch.arange(20)).all()


@pytest.mark.parametrize(
    "make, parts",
    [
        (lambda: kvops.KeyDiff(9, protect="all"), ("protect must be one of 'prompt', got 'all'",)),
        (lambda: kvops.KeyDiff(9, protect=True), ("protect must be one of 'prompt', got True",)),
        (lambda: kvops.KeyDiff(0.5, protect="prompt"), ("protect='prompt' needs a budget in tokens", "got 0.5")),
        (lambda: kvops.H2O(9, protect="prompt", buffer=None), ("protect='prompt' needs a buffer", "got None")),
        (
            lambda: kvops.KeyDiff(9, protect="prompt").compress(*tokens(20)[1:]),
            ("KeyDiff: a one-shot call cannot tell the prompt", "expected protect=None, got 'prompt'"),
        ),
        (
            lambda: kvops.TOVA(9, protect="prompt").compress(*tokens(20)[1:], tokens(1)[0]),
            ("TOVA: a one-shot call cannot tell the prompt",),
        ),
    ],
)
def test_what_protect_refuses(make, parts):
    with kit.refuses(*parts):
        make()


def test_slots_chosen_by_hand_are_refused():
    cache = kvops.Cache(kvops.KeyDiff(BUDGET, **OPTIONS))
    feed(cache, tokens(20), [20])
    with kit.refuses("KeyDiff: keep.. expected a policy with protect=None"):
        cache.keep(torch.arange(5))
    assert len(cache) == 20


def test_a_policy_by_name():
    assert kvops.policy("r-kv:budget=512,protect=prompt") == kvops.RKV(512, protect="prompt")
