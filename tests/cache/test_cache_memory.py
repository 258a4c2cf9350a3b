"""A cache's memory: in-place writes of decode, what they must not change, and the decode buffer."""

import copy

import pytest
import torch

import kit
import kvops

pytestmark = kit.every_device

POLICIES = [
    kvops.Full(),
    kvops.LagKV(8, 0.5, sinks=3),
    kvops.KeyDiff(40, buffer=1),
    kvops.KeyDiff(40, sinks=2, buffer=7),
    kvops.StreamingLLM(40, buffer=0.2),
    kvops.SATKV(40, 4, buffer=3),
    kvops.SnapKV(40, 4),
    kvops.H2O(40, buffer=1),
    kvops.H2O(40, buffer=6),
    kvops.TOVA(40, buffer=4),
    kvops.ProtoKV(40, 4, num_sats=4, num_chunks=6, buffer=5, alpha=2),
    kvops.LaCache(48, span=2, overlap=0, sinks=2),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)
PROMPT, N = 60, 130


def make(policy, storage=None):
    rope = None if storage is None else kvops.Rope.of(16)
    return kvops.Cache(policy, layer=1, num_layers=4, rope=rope, storage=storage or "pre_rope")


def inputs(seed=0, n=N):
    k, v = kit.kv(2, 2, n, 16, dv=8, seed=seed)
    return kit.randn(2, 4, n, 16, seed=seed + 1), k, v


def feed(cache, x, first=0, last=N, look=lambda: None):
    """Read the prompt at once, then token by token; return the outputs. look: called after each step."""
    out = []
    while first < last:
        end = first + (PROMPT if first == 0 else 1)
        out.append(cache.attend(*(y[:, :, first:end] for y in x)))
        look()
        first = end
    return torch.cat(out, 2)


def assert_same(a, b):
    assert a.seen == b.seen and len(a) == len(b) and torch.equal(a.positions, b.positions)
    assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)


def caches():
    return [*((x, None) for x in POLICIES), *((POLICIES[i], y) for i in (4, 11) for y in ("pre_rope", "post_rope"))]


every_cache = pytest.mark.parametrize("policy, storage", caches(), ids=str)


@every_cache
def test_a_look_at_the_state_changes_nothing(policy, storage):
    """Reading K and V after each step gives the kept slots, and the next step is bit-identical."""
    x = inputs()
    calm, watched = make(policy, storage), make(policy, storage)

    def look():
        held = watched.k.clone(), watched.v.clone()
        assert watched.k.shape[2] == len(watched) == watched.positions.shape[2]
        assert torch.equal(watched.k, held[0]) and torch.equal(watched.v, held[1])

    assert torch.equal(feed(calm, x), feed(watched, x, look=look))
    assert_same(calm, watched)


@every_policy
def test_decode_writes_in_place(policy):
    """Memory is allocated once in many steps, and not more than the tokens need."""
    q, k, v = inputs(n=400)
    cache, places, most = make(policy), [], 0
    for first in range(400):
        cache.attend(*(x[:, :, first : first + 1] for x in (q, k, v)))
        places.append(cache._memory.k.data_ptr())
        most = max(most, len(cache))
        kit.assert_holds_little(cache, 16 + 8)
    changes = sum(a != b for a, b in zip(places, places[1:]))
    assert changes <= 400 // 16 + 1, changes


def test_what_append_returned_is_whole_until_the_next_call():
    k, v = kit.kv(2, 2, N, 16, dv=8)
    cache = kvops.Cache(kvops.KeyDiff(40, buffer=3))
    cache.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
    for i in range(PROMPT, N):
        held = cache.k.clone() if i % 2 else None
        k_step, v_step = cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert torch.equal(k_step[:, :, -1], k[:, :, i]) and torch.equal(v_step[:, :, -1], v[:, :, i])
        before = k_step.clone(), v_step.clone()
        if held is not None:
            assert torch.equal(k_step[:, :, :-1], held)
        assert len(cache) == cache.k.shape[2] == cache.positions.shape[2]
        assert torch.equal(k_step, before[0]) and torch.equal(v_step, before[1])


@every_cache
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("at", [PROMPT, 95, 96, 97])
def test_copies_go_on_by_themselves(policy, storage, how, at):
    x, y = inputs(), inputs(seed=5)
    both = [torch.cat((a[:, :, :at], b[:, :, at:]), 2) for a, b in zip(x, y)]
    one = make(policy, storage)
    feed(one, x, last=at)
    two = how(one)
    for i in range(at, N):  # in turns
        one.attend(*(a[:, :, i : i + 1] for a in x))
        two.attend(*(a[:, :, i : i + 1] for a in both))
    for cache, tokens in ((one, x), (two, both)):
        alone = make(policy, storage)
        feed(alone, tokens)
        assert_same(cache, alone)


@every_cache
def test_rows_are_reordered_with_their_memory(policy, storage):
    q, k, v = inputs()
    cache, swapped = make(policy, storage), make(policy, storage)
    feed(cache, (q, k, v), last=100)
    cache.reorder(torch.tensor([1, 0]))
    feed(cache, [x.flip(0) for x in (q, k, v)], first=100)
    feed(swapped, [x.flip(0) for x in (q, k, v)])
    assert_same(cache, swapped)


@every_cache
def test_a_failed_step_leaves_the_cache_as_it_was(policy, storage):
    q, k, v = inputs()
    cache, alone = make(policy, storage), make(policy, storage)
    feed(cache, (q, k, v), last=100)
    for i in range(100, N):
        step = [x[:, :, i : i + 1] for x in (q, k, v)]
        with pytest.raises(ValueError):
            cache.attend(step[0][..., :8], *step[1:])
        with pytest.raises(ValueError):
            cache.attend(step[0], step[1], step[2][:, :, :0])
        cache.attend(*step)
    feed(alone, (q, k, v))
    assert_same(cache, alone)


@every_policy
def test_memory_from_inference_mode_serves_outside_of_it(policy):
    x = inputs()
    cache, alone = make(policy), make(policy)
    with torch.inference_mode():
        feed(cache, x, last=90)
    feed(cache, x, first=90, last=110)
    with torch.inference_mode():
        feed(cache, x, first=110)
    feed(alone, x)
    assert_same(cache, alone)


def test_a_long_question_gives_its_memory_back():
    """A second prompt is compressed into memory of its own size, and so are the tokens that a crop leaves."""
    k, v = kit.kv(2, 2, 1000, 16, dv=8)
    cache = kvops.Cache(kvops.KeyDiff(40))
    for part in (slice(0, 50), slice(50, 51), slice(51, 700), slice(700, 701)):
        cache.append(k[:, :, part], v[:, :, part])
        kit.assert_holds_little(cache, 16 + 8)
    full = kvops.Cache(kvops.Full())
    full.append(k, v)
    full.crop(100)
    kit.assert_holds_little(full, 16 + 8)
    assert torch.equal(full.k, k[:, :, :100]) and torch.equal(full.v, v[:, :, :100])


@pytest.mark.parametrize("policy", [kvops.KeyDiff, kvops.StreamingLLM, kvops.L2, kvops.Random, kvops.TOVA, kvops.H2O])
@pytest.mark.parametrize("buffer, most", [(1, 0), (5, 4), (0.1, 3), (0.01, 0), (None, N - PROMPT)])
def test_decode_holds_no_more_than_the_buffer(policy, buffer, most):
    """Prompts shrink to the budget; decode grows to just below budget + buffer, and shrinks again."""
    x = inputs()
    cache, lengths = make(policy(40, buffer=buffer)), []
    for first, last in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, N))):
        cache.attend(*(y[:, :, first:last] for y in x))
        lengths.append(len(cache))
    every = most + 1
    assert lengths == [40 + i % every for i in range(N - PROMPT + 1)]
    cache.attend(*(y[:, :, :2] for y in x))  # two tokens are not a decode step
    assert len(cache) == 40


@pytest.mark.parametrize("policy", [kvops.KeyDiff, kvops.StreamingLLM, kvops.L2, kvops.Random])
def test_a_buffer_is_a_later_eviction_by_the_same_rule(policy):
    """The kept tokens are those that one call would keep of all cached tokens."""
    k, v = kit.kv(1, 2, N, 16, dv=8)
    cache = kvops.Cache(policy(40, buffer=10))
    cache.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
    for i in range(PROMPT, PROMPT + 10):
        held = cache.positions
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    held = torch.cat((held, torch.tensor(PROMPT + 9).expand(1, 2, 1)), 2)
    assert len(cache) == 40 and held.shape[2] == 50
    if policy is kvops.Random:  # its ranks depend on positions
        return
    at = held.unsqueeze(-1)
    k_held, v_held = k.gather(2, at.expand(-1, -1, -1, 16)), v.gather(2, at.expand(-1, -1, -1, 8))
    assert torch.equal(cache.positions, held.gather(2, policy(40).compress(k_held, v_held).indices))


def test_positions_that_are_written_in_place_are_seen():
    """The angles of a step are computed once for all layers, but anew when the same tensor has new values."""
    q, k, v = inputs()
    static, fresh = (kvops.Cache(kvops.StreamingLLM(40, buffer=1), rope=kvops.Rope.of(16)) for _ in range(2))
    here = torch.tensor([PROMPT])
    for i in range(PROMPT, N):
        step = [x[:, :, i : i + 1] for x in (q, k, v)]
        if i == PROMPT:
            for cache in (static, fresh):
                cache.attend(*(x[:, :, :PROMPT] for x in (q, k, v)), positions=torch.arange(PROMPT))
        out = static.attend(*step, positions=here)
        assert torch.equal(out, fresh.attend(*step, positions=torch.tensor([i])))
        here += 1
    assert_same(static, fresh)


def test_layers_of_a_step_share_its_angles():
    rope, positions = kvops.Rope.of(16), torch.tensor([9])
    assert rope.new_slots(positions, 5, 1, positions.device) is not None
    first, again = (rope.new_slots(positions, 5, 1, positions.device) for _ in range(2))
    assert first[0] is again[0] and first[1] is again[1]
    assert rope.new_slots(positions, 6, 1, positions.device)[0] is not first[0]
    assert rope.new_slots(None, 5, 1, positions.device)[1] is None
