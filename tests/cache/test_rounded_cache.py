"""Caches of rounded rows: `kvops.Cache(storage="int8")` and "fp8"."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import kit
import kvops
from test_policies import POLICIES

pytestmark = kit.every_device

N, STEPS, D, DV = 60, 12, 16, 48
#: The dtype of what is stored, and the bytes of a row beside its numbers.
BYTES = {"int8": (torch.int8, 16), "fp8": (torch.uint8, 0)}
every_storage = pytest.mark.parametrize("storage", BYTES)
#: For these head dims.
POLICIES = {
    name: replace(x, w_o=torch.ones(24, 4 * DV).cumsum(0)) if getattr(x, "w_o", None) is not None else x
    for name, x in POLICIES.items()
}
#: Those that change the rows that they keep.
REFUSED = {name for name, x in POLICIES.items() if isinstance(x, (kvops.LaCache, kvops.AttentionMatching)) or x.merge}
ADAPTIVE = {
    "keydiff-adaptive": kvops.KeyDiff(20, head_mode="adaptive", recent=2, buffer=4),
    "snapkv-adaptive": kvops.SnapKV(20, window=4, head_mode="adaptive"),
}
#: Without those whose stages only a model runs (test_hf_rounded.py), and those that need a rope.
STREAMING = {
    name: x for name, x in POLICIES.items() if name not in REFUSED and not x.needs.stage and not x.needs.statistics
} | ADAPTIVE


def tokens(dtype=torch.bfloat16, b=2, n=N + STEPS):
    """Queries, keys and values of a whole sequence, the keys of very different sizes."""
    k, v = kit.kv(b, 2, n, D, dtype, dv=DV)
    k = k * torch.exp(kit.randn(b, 2, n, 1, seed=5)).to(dtype)
    return kit.randn(b, 4, n, D, seed=1).to(dtype), k, v


def rounded(storage: str, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    if storage == "fp8":
        return x.to(torch.float8_e4m3fn).to(dtype or x.dtype)
    return kvops.dequantize_rows(*kvops.quantize_rows(x), dtype or x.dtype)


def inputs(policy, q, part):
    """What a layer is called with, for policies that read it."""
    if not policy.needs.inputs:
        return {}
    ids = torch.zeros(q[:, 0, part, 0].shape, dtype=torch.int64)
    return {"inputs": kvops.LayerInputs(q[:, 0, part].float(), ids)}


def made(policy, **options):
    return kvops.Cache(policy, layer=1, num_layers=4, **options)


def attended(q, k, v, first):
    """The exact attention of q's rows, of which row i sees the first `first` + i keys."""
    q, k, v = (x.double() for x in (q, k, v))
    logits = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT / D**0.5
    hidden = torch.arange(k.shape[2]) >= first + torch.arange(q.shape[2])[:, None]
    return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


@every_storage
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", STREAMING.values(), ids=STREAMING)
def test_what_is_stored(policy, dtype, storage):
    """Prompt, second turn, decode: the kept rows are those of the sequence, rounded once, and less memory holds them;
    each step attends to the rows that were there before it."""
    q, k, v = tokens(dtype)
    cache = made(policy, storage=storage)
    whole, turn = slice(0, N), slice(N, N + 6)
    out = cache.attend(q[:, :, whole], k[:, :, whole], v[:, :, whole], **inputs(policy, q, whole))
    torch.testing.assert_close(out.double(), attended(*(x[:, :, whole] for x in (q, k, v)), 1), rtol=2e-2, atol=2e-2)
    back = rounded(storage, k), rounded(storage, v)
    exact = rounded(storage, k, torch.float64), rounded(storage, v, torch.float64)
    for part in (turn, *(slice(i, i + 1) for i in range(N + 6, N + STEPS))):
        held = cache.positions
        if not cache.ragged:
            before = [x.gather(2, held.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in exact]
            mine = [torch.cat((x, y[:, :, part]), 2) for x, y in zip(before, exact)]
            want = attended(q[:, :, part].bfloat16(), *mine, before[0].shape[2] + 1)
        out = cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], **inputs(policy, q, part))
        if not cache.ragged:
            torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
        positions = cache.positions
        for found, x in ((cache.k, back[0]), (cache.v, back[1])):
            assert found.dtype == dtype
            at = positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, x.shape[3])
            expected = x.gather(2, at).masked_fill((positions < 0).unsqueeze(-1), 0)
            order = positions.masked_fill(positions < 0, 1 << 40)
            assert (order[..., 1:] >= order[..., :-1]).all()
            assert torch.equal(found, expected)
    rows = cache.storage_tensors
    kind, more = BYTES[storage]
    assert all(x.dtype == kind for x in rows) and [x.shape[-1] for x in rows[:2]] == [D + more, DV + more]


@every_storage
@pytest.mark.parametrize("policy", STREAMING.values(), ids=STREAMING)
def test_it_keeps_what_a_cache_keeps(policy, storage):
    """The prompt is scored before it is rounded."""
    q, k, v = tokens()
    caches = [made(policy, storage=x) for x in (storage, "pre_rope")]
    whole = slice(0, N)
    for cache in caches:
        cache.attend(*(x[:, :, whole] for x in (q, k, v)), **inputs(policy, q, whole))
    mine, other = (x.positions for x in caches)
    assert mine.shape == other.shape and caches[0].nbytes < 0.8 * caches[1].nbytes
    assert torch.equal(mine, other)


@every_storage
@pytest.mark.parametrize("policy", STREAMING.values(), ids=STREAMING)
def test_padded_batches(policy, storage):
    """They run with every policy, and hold rows of the padded prompt."""
    q, k, v = tokens(b=3)
    cache, whole = made(policy, storage=storage), slice(0, N)
    cache.set_pads(kit.int32(0, 7, 20))
    for part in (whole, *(slice(i, i + 1) for i in range(N, N + STEPS))):
        cache.attend(*(x[:, :, part] for x in (q, k, v)), **inputs(policy, q, part))
    positions, back = cache.positions, rounded(storage, k)
    at = positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, D)
    want = back.gather(2, at).masked_fill((positions < 0).unsqueeze(-1), 0)
    padding = torch.zeros(3, dtype=torch.int32) if cache.pads is None else cache.pads  # these slots hold anything
    token = (torch.arange(len(cache)) >= padding[:, None])[:, None].expand(positions.shape)
    assert torch.equal(cache.k[token], want[token]) and token.any(-1).all()


@every_storage
@pytest.mark.parametrize(
    "policy", [kvops.SnapKV(20, window=4), kvops.KeyDiff(20, buffer=4), ADAPTIVE["keydiff-adaptive"]], ids=str
)
def test_padding_beams_copies_and_errors(policy, storage):
    q, k, v = tokens(b=3)
    cache = kvops.Cache(policy, storage=storage)
    cache.set_pads(kit.int32(0, 7, 20))
    whole = slice(0, N)
    cache.attend(*(x[:, :, whole] for x in (q, k, v)))
    alone = kvops.Cache(policy, storage=storage)
    alone.attend(*(x[1:2, :, 7:N] for x in (q, k, v)))
    held = cache.positions[1] - 7
    for h in range(2):
        assert torch.equal(held[h][held[h] >= 0], alone.positions[0, h][alone.positions[0, h] >= 0])
    twin, other = copy.copy(cache), pickle.loads(pickle.dumps(cache))
    step = slice(N, N + 1)
    outs = [x.attend(*(y[:, :, step] for y in (q, k, v))) for x in (cache, twin, other)]
    assert kit.same(outs[0], outs[1]) and kit.same(outs[0], outs[2])
    cache.crop(N)
    again = cache.attend(*(y[:, :, step] for y in (q, k, v)))
    assert kit.same(again, outs[0])
    cache.reorder(torch.tensor([1, 1, 0]))
    more = slice(N + 1, N + 2)
    rows = [1, 1, 0]
    out = cache.attend(*(y[rows][:, :, more] for y in (q, k, v)))
    assert kit.same(out, twin.attend(*(y[:, :, more] for y in (q, k, v)))[rows])
    with kit.refuses(
        "k must match the cached tokens in .b, Hk, d., dtype and device", "torch.bfloat16", "torch.float32"
    ):
        cache.attend(*(y[rows][:, :, more].float() for y in (q, k, v)))
    with kit.refuses("expected .3, 2, 16. torch.bfloat16 .*, got .3, 2, 48."):
        cache.append(v[:, :, more], v[:, :, more])


@every_storage
def test_errors(storage):
    for name in REFUSED:
        with kit.refuses(f"storage='{storage}' expected a policy that keeps K and V as they are"):
            kvops.Cache(POLICIES[name], storage=storage)
    with kit.refuses(f"storage='{storage}' is for caches without rope=, expected None, got a kvops.Rope"):
        kvops.Cache(kvops.StreamingLLM(20, positions="slots"), storage=storage, rope=kvops.Rope.of(16))
    with kit.refuses(f"storage='{storage}' needs attend_before_compress=True, got False"):
        kvops.Cache(kvops.KeyDiff(20), storage=storage, attend_before_compress=False)
    cache = kvops.Cache(kvops.KeyDiff(20), storage=storage)
    k, v = kit.kv(1, 2, 8, 24)
    with kit.refuses(f"with storage='{storage}' k must be torch.float32, .* with a head_dim that is a multiple of 16"):
        cache.append(k, v)
    with kit.refuses(f"with storage='{storage}' k must be torch.float32, .* got torch.int8"):
        cache.append(*(x[..., :16].to(torch.int8) for x in (k, v)))


@every_storage
@pytest.mark.parametrize("policy", [kvops.SnapKV(20, window=4), kvops.KeyDiff(20)], ids=str)
def test_an_empty_cache_takes_a_first_step(policy, storage):
    """Also one that a step without tokens or a crop of all has emptied: it decides on what is not rounded yet."""
    q, k, v = (x[:, :, :N] for x in tokens())
    new, empty, cropped = (made(policy, storage=storage) for _ in range(3))
    empty.append(k[:, :, :0], v[:, :, :0])
    if isinstance(policy, kvops.SnapKV):
        empty.reset()  # each of its steps needs an attention
    cropped.attend(*(x[:, :, :15] for x in (q, k, v)))
    cropped.crop(0)
    outs = [x.attend(q, k, v) for x in (new, empty, cropped)]
    for out, cache in zip(outs[1:], (empty, cropped)):
        assert kit.same(out, outs[0]) and torch.equal(cache.positions, new.positions)
        assert kit.same((cache.k, cache.v), (new.k, new.v))


@every_storage
def test_tokens_of_any_strides(storage):
    """Such as a model's projections, [b, n, Hk, d], seen as [b, Hk, n, d]."""
    q, k, v = tokens()
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    caches = [made(kvops.KeyDiff(40, buffer=4), storage=storage) for _ in range(2)]
    for part in (slice(0, 30), slice(30, N), slice(N, N + 1)):
        outs = [x.attend(*(y[:, :, part] for y in rows)) for x, rows in zip(caches, ((q, k, v), views))]
        assert kit.same(*outs)
        assert all(y.is_contiguous() for x in caches for y in x.storage_tensors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("policy", STREAMING.values(), ids=STREAMING)
def test_fp8_of_the_callers_own(policy, dtype):
    """Without a storage that rounds, a cache attends to fp8 rows, and keeps what it keeps of the same bf16 numbers."""
    q, k, v = tokens()
    k, v = k.to(dtype), v.to(dtype)
    caches, parts = (made(policy), made(policy)), (slice(0, N), *(slice(i, i + 1) for i in range(N, N + STEPS)))
    for part in parts:
        step = k[:, :, part], v[:, :, part]
        outs = [
            caches[0].attend(q[:, :, part], *step, **inputs(policy, q, part)),
            caches[1].attend(q[:, :, part], *(x.bfloat16() for x in step), **inputs(policy, q, part)),
        ]
        torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    assert torch.equal(*(x.positions for x in caches)) and caches[0].k.dtype == dtype
    assert kit.same(caches[0].k.bfloat16(), caches[1].k)


def test_fp8_is_saturated():
    """Numbers beyond the range are the largest, and infinities NaN, so that neither hides."""
    k, v = kit.kv(1, 2, 8, 16)
    k[0, 0, 1, 2], k[0, 1, 3, 4], v[0, 1, 5, 6], v[0, 0, 7, 8] = 1e4, -torch.inf, torch.inf, -449
    cache = kvops.Cache(kvops.KeyDiff(20), storage="fp8")
    cache.append(k, v)
    want = [x.clamp(-448, 448).masked_fill(x.isinf(), torch.nan).to(torch.float8_e4m3fn).float() for x in (k, v)]
    assert kit.same((cache.k, cache.v), tuple(want))
    assert cache.k[0, 0, 1, 2] == 448 and cache.k.isnan().sum() == 1
    assert cache.v[0, 0, 7, 8] == -448 and cache.v.isnan().sum() == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_bytes_of_the_callers_own_are_only_moved(dtype):
    """Without a storage that rounds, a cache takes one-byte rows as they are, for an attention elsewhere."""
    k, v = (x.to(torch.int8).view(dtype) for x in kit.kv(1, 2, 40, 32))
    cache = kvops.Cache(kvops.StreamingLLM(20))
    cache.append(k[:, :, :30], v[:, :, :30])
    for i in range(30, 40):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    at = cache.positions.unsqueeze(-1).expand(-1, -1, -1, 32)
    assert kit.same((cache.k, cache.v), (k.gather(2, at), v.gather(2, at)))
    step = k[:, :, :1], v[:, :, :1]
    message = f"attention needs keys and values in a floating-point dtype, got {dtype}"
    with kit.refuses(message):
        cache.attend(torch.ones(1, 2, 1, 32, dtype=torch.bfloat16), *step)
    with kit.refuses(message):
        cache.attention(torch.ones(1, 2, 1, 32, dtype=torch.bfloat16), *cache.append(*step))
    with kit.refuses(message):
        kvops.Cache(kvops.SnapKV(20, window=4)).attend(torch.ones(1, 2, 30, 16).bfloat16(), k[:, :, :30], v[:, :, :30])


PAGED = "keydiff lagkv snapkv chunkkv pyramidkv h2o tova r-kv criticalkv random dropkv".split()
PAGED_POLICIES = [POLICIES[x] for x in PAGED if x in POLICIES] + [
    kvops.KeyDiff(20, buffer=None),
    kvops.SnapKV(20, window=4, head_mode="adaptive"),
]


@every_storage
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("policy", PAGED_POLICIES, ids=str)
def test_pages(policy, by_head, storage):
    """A PagedCache of rounded rows is one whose tokens were rounded before: same slots, nearly the same outputs."""
    sizes = dict(num_layers=2, kv_heads=2, head_dim=D, v_head_dim=DV, page_size=8, dtype=torch.float32)
    try:
        caches = [kvops.PagedCache(policy, 200, by_head=by_head, storage=x, **sizes) for x in (storage, None)]
    except ValueError as error:
        assert "storage" not in str(error)
        pytest.skip(str(error))
    outs: list[list] = [[], []]
    for out, cache in zip(outs, caches):
        a, b = cache.join(prompt=50), cache.join(prompt=33)
        for turn, counts in enumerate(([50, 33], *[[1, 1]] * 14)):
            with cache.step([a, b], counts) as step:
                for layer in range(2):
                    seeds = range(9 * turn + 3 * layer, 9 * turn + 3 * layer + 3)
                    shapes = (4, D), (2, D), (2, DV)
                    q, k, v = (kit.randn(2, h, max(counts), d, seed=i) for i, (h, d) in zip(seeds, shapes))
                    if cache is caches[1]:
                        q, k, v = q.bfloat16().float(), rounded(storage, k), rounded(storage, v)
                    out.append(step.attend(layer, q, k, v))
    for mine, other in zip(*outs):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)
    for request in (1, 2):
        for layer in range(2):
            for head in range(2):
                assert torch.equal(*(x.positions(request, layer, head) for x in caches))
    assert caches[0].free == caches[1].free
    rows = (
        sum(x.nbytes for x in (caches[0].k[0], caches[0].v[0])),
        sum(x.nbytes for x in (caches[1].k[0], caches[1].v[0])),
    )
    assert rows[0] * (D + DV) * 4 == rows[1] * (D + DV + 2 * BYTES[storage][1])


@every_storage
def test_errors_of_pages(storage):
    sizes = dict(num_layers=1, kv_heads=2, head_dim=16)
    for changes, message in (
        (dict(head_dim=24), f"storage='{storage}' rounds .* multiples of 16, got torch.float32 and .24, 24."),
        (dict(dtype=torch.float8_e5m2), f"storage='{storage}' rounds .*, got torch.float8_e5m2"),
        (dict(dtype=torch.int8), "PagedCache: dtype must be a floating-point torch.dtype, got torch.int8"),
        (dict(dtype="bfloat16"), "PagedCache: dtype must be a floating-point torch.dtype, got 'bfloat16'"),
        (dict(storage="int4"), "PagedCache: storage must be one of 'int8', 'fp8', got 'int4'"),
    ):
        with kit.refuses(message):
            kvops.PagedCache(kvops.KeyDiff(20), 8, **sizes | dict(storage=storage) | changes)
    cache = kvops.PagedCache(kvops.KeyDiff(20), 8, storage=storage, **sizes)
    k, _ = kit.kv(1, 2, 4, 32)
    with cache.step([cache.join(prompt=4)], 4) as step:
        with kit.refuses("PagedCache: k must be .1, 2, 4, 16. torch.float32", "got .1, 2, 4, 32."):
            step.attend(0, torch.cat((k, k), 1), k, k)
        step.attend(0, *(x[..., :16] for x in (torch.cat((k, k), 1), k, k)))
