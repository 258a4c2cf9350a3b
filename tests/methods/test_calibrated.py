"""Expected Attention and TriAttention against the authors' formulas in plain PyTorch, and the query statistics."""

import copy
import json
import math
import threading
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kit
import kvops
from kvops import ExpectedAttention, QueryStatistics, Rope, TriAttention
from kvops.methods.statistics import resolved, unrotated
from kvops.methods.triattention import LEAST_STD

HEADS, GROUP, D, N = 2, 3, 32, 300


def rope(interleaved=False, pairs=D // 2, scaling=1.0) -> Rope:
    return Rope(Rope.of(2 * pairs).inv_freq, interleaved, scaling)


def rotate(x, positions, of: Rope):
    """RoPE as models compute it. x: [.., tokens, d]."""
    pairs = len(of.inv_freq)
    cos, sin = (y.double() for y in of.tables(positions))
    turned, rest = x.double()[..., : 2 * pairs], x.double()[..., 2 * pairs :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if of.interleaved else (turned[..., :pairs], turned[..., pairs:])
    first, second = a * cos - b * sin, b * cos + a * sin
    mixed = torch.stack((first, second), -1).flatten(-2) if of.interleaved else torch.cat((first, second), -1)
    return torch.cat((mixed, rest), -1)


def case(of: Rope, n=N, layers=1, seed=0):
    """Return queries before RoPE, their statistics, and rotated keys with their values."""
    q = [kit.randn(1, HEADS * GROUP, 200, D, seed=seed + i) + kit.randn(1, HEADS * GROUP, 1, D) for i in range(layers)]
    before, v = kit.kv(1, HEADS, n, D, seed=seed)
    k = rotate(before, torch.arange(n), of).float()
    return q, QueryStatistics.of(q, of), before, k, v


def expected_attention(q, k, v, of: Rope, *, sinks, future, covariance=True, value_norm=True, epsilon=0.0):
    """kvpress' ExpectedAttentionPress, in fp64, given queries instead of hidden states. Scores of all but the sinks."""
    n, d = k.shape[2:]
    mu, cov = q[0].double().mean(1), torch.stack([x.double().T.cov(correction=0) for x in q[0]])
    matrix = rotate(torch.eye(d).expand(future, 1, d, d).transpose(0, 2), torch.arange(n, n + future), of)
    matrix = matrix.mean(2)[:, 0].T  # the mean rotation: column j is the rotated j-th unit vector
    mu, cov = mu @ matrix.T, matrix @ cov @ matrix.T
    keys = k[0, :, sinks:].double().repeat_interleave(GROUP, 0)
    scores = torch.einsum("hd,hnd->hn", mu, keys) / math.sqrt(d)
    if covariance:
        scores = scores + torch.einsum("hni,hij,hnj->hn", keys, cov, keys) / d / 2
    scores = scores.softmax(-1).view(HEADS, GROUP, -1).mean(1)
    return (scores + epsilon) * v[0, :, sinks:].double().norm(dim=-1) if value_norm else scores


def series(q, before, of: Rope, max_offset=65536):
    """The authors' score_keys_for_round_reference for each query head, in fp64: [Hq, n]."""
    pairs, omega, s2 = len(of.inv_freq), of.inv_freq.double(), of.scaling**2

    def complex_pairs(x):
        x = x.double()[..., : 2 * pairs]
        return torch.complex(*((x[..., ::2], x[..., 1::2]) if of.interleaved else (x[..., :pairs], x[..., pairs:])))

    queries = complex_pairs(q[0])  # [Hq, w, pairs]
    q_mean, q_abs = queries.mean(1), queries.abs().mean(1)
    offsets = torch.tensor([2.0**i for i in range(40) if 2**i <= max_offset], dtype=torch.float64)
    every = []
    for head in range(HEADS * GROUP):
        k = complex_pairs(before[0, head // GROUP])  # [n, pairs]
        relative = q_mean[head] * k.conj()
        amplitude, phi = q_mean[head].abs() * k.abs(), torch.atan2(relative.imag, relative.real)
        extra = (q_abs[head] - q_mean[head].abs()) * k.abs()
        delta = (N - torch.arange(len(k), dtype=torch.float64))[:, None] + offsets
        phase = delta[..., None] * omega + phi[:, None]
        scores = (amplitude[:, None] * s2 * phase.cos()).sum(2) + (extra * s2).sum(1, keepdim=True)
        every.append(scores.mean(1))
    return torch.stack(every)


def triattention(scores, normalize=True):
    """Their z-score and maximum over the group: [Hq, n] -> [Hk, n]."""
    if normalize:
        std = scores.std(1, unbiased=False, keepdim=True).clamp_min(LEAST_STD)
        scores = (scores - scores.mean(1, keepdim=True)) / std
    return scores.view(HEADS, GROUP, -1).amax(1)


ROPES = {"NeoX": {}, "GPT-J": {"interleaved": True}, "YaRN": {"scaling": 1.2}}


@pytest.mark.parametrize("form", ROPES)
@pytest.mark.parametrize(
    "options", [{}, {"covariance": False}, {"value_norm": False}, {"epsilon": 0.01, "future": 64}, {"sinks": 0}]
)
def test_expected_attention_is_kvpress(form, options):
    of = rope(**ROPES[form])
    q, statistics, _, k, v = case(of)
    policy = ExpectedAttention(100, statistics=statistics, **options)
    golden = expected_attention(q[0], k, v, of, **{"sinks": policy.sinks, "future": policy.future} | options)
    found = policy.scores(kvops.View(k, v))[0]
    torch.testing.assert_close(found[:, policy.sinks :].double(), golden, rtol=2e-4, atol=1e-7)
    kept = policy.compress(k, v).indices[0]
    for h in range(HEADS):
        best = golden[h].topk(100 - policy.sinks).indices.sort().values + policy.sinks
        assert kept[h].tolist() == [*range(policy.sinks), *best.tolist()]


@pytest.mark.parametrize("form", [*ROPES, "some channels"])
@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"max_offset": 100}])
def test_triattention_is_the_authors_code(form, options):
    """If some channels are not rotated, the mean query's product with them is added, as their frequency is 0."""
    of = rope(pairs=6) if form == "some channels" else rope(**ROPES[form])
    q, statistics, before, k, v = case(of)
    policy = TriAttention(100, recent=10, statistics=statistics, **options)
    scores = series(q[0], before, of, policy.max_offset)
    if form == "some channels":
        rest = statistics.mean[0].double().view(HEADS, GROUP, D)[..., 12:] @ before[0, :, :, 12:].double().mT
        scores = scores + rest.flatten(0, 1)
    golden = triattention(scores, policy.normalize)
    found = policy.scores(kvops.View(k, v))[0].double()
    torch.testing.assert_close(found, golden, rtol=1e-4, atol=2e-4)
    kept = policy.compress(k, v).indices[0]
    for h in range(HEADS):
        best = golden[h, :-10].topk(90).indices.sort().values
        assert kept[h].tolist() == [*best.tolist(), *range(N - 10, N)]


def test_scores_are_normalized_over_the_tokens_that_compete():
    """Those after the sinks; with protect="prompt" those after the prompt, which the authors' code never evicts."""
    of, tokens = rope(), 120
    q, statistics, before, k, v = case(of)
    golden = triattention(series(q[0], before, of)[:, tokens:], True)
    found = TriAttention(200, sinks=tokens, recent=10, statistics=statistics).scores(kvops.View(k, v))[0].double()
    torch.testing.assert_close(found[:, tokens:], golden, rtol=1e-4, atol=2e-4)
    cache = kvops.Cache(TriAttention(80, recent=10, buffer=100, protect="prompt", statistics=statistics))
    cache.append(k[:, :, :tokens], v[:, :, :tokens])
    for i in range(tokens, N):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    assert len(cache) == tokens + 80
    for h in range(HEADS):
        best = golden[h, :-10].topk(70).indices.sort().values + tokens
        assert cache.positions[0, h].tolist() == [*range(tokens), *best.tolist(), *range(N - 10, N)]


METHODS = (ExpectedAttention, TriAttention)


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_scores_at_the_positions_seen(method):
    """After evictions the next position is that of the sequence, not the number of slots."""
    of = rope()
    _, statistics, before, k, v = case(of)
    policy = method(64, recent=8, buffer=16, statistics=statistics)
    cache = kvops.Cache(policy)
    cache.append(k[:, :, :200], v[:, :, :200])
    assert len(cache) == 64
    for i in range(200, 216):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    kept = cache.positions
    assert len(cache) == 64 and (kept[..., -8:] == torch.arange(208, 216)).all()
    first = policy.compress(k[:, :, :200], v[:, :, :200]).indices
    held = torch.cat((first, torch.arange(200, 216).expand(1, HEADS, -1)), 2)
    rows = held.unsqueeze(-1).expand(-1, -1, -1, D)
    view = kvops.View(k.gather(2, rows), v.gather(2, rows), seen=216, new=1, kept=first)
    assert torch.equal(held.gather(2, policy.choose(policy.scores(view), view, 64, recent=8)), kept)


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data(), n=st.integers(60, 90))
@kit.examples(15)
def test_padded_rows_keep_what_they_keep_alone(method, data, n):
    of = rope()
    _, statistics, before, _, v = case(of, n)
    k, v = torch.full((2, HEADS, n, D), torch.nan), v.expand(2, -1, -1, -1).clone()
    starts = [data.draw(st.integers(0, 10)) for _ in range(2)]
    lengths = [data.draw(st.integers(40, n - s)) for s in starts]
    for row, (s, c) in enumerate(zip(starts, lengths)):
        k[row, :, s : s + c] = rotate(before[0, :, :c], torch.arange(c), of).float()
    policy = method(24, recent=4, statistics=statistics)
    together = policy.compress(k, v, starts=kit.int32(*starts), lengths=kit.int32(*lengths))
    for row, (s, c) in enumerate(zip(starts, lengths)):
        alone = policy.compress(k[row : row + 1, :, s : s + c], v[row : row + 1, :, s : s + c])
        assert torch.equal(together.indices[row] - s, alone.indices[0])


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_evicted_first(method):
    _, statistics, _, k, v = case(rope())
    clean = method(200, recent=4, statistics=statistics).compress(k, v).indices
    k[0, 1, 100, 3] = torch.nan
    k[0, 1, 120, 3] = torch.inf
    kept = method(298, recent=4, statistics=statistics).compress(k, v).indices
    assert not {100, 120} & set(kept[0, 1].tolist())
    assert torch.equal(method(200, recent=4, statistics=statistics).compress(k, v).indices[0, 0], clean[0, 0])


def test_adaptive_budgets():
    _, statistics, _, k, v = case(rope())
    policy = ExpectedAttention(60, statistics=statistics, head_mode="adaptive", epsilon=0.01)
    kept = (policy.compress(k, v).indices >= 0).sum(-1)
    assert kept.sum() == 60 * HEADS and (kept >= 4).all()


@pytest.mark.parametrize("method", METHODS)
def test_statistics_are_required(method, tmp_path):
    _, statistics, _, k, v = case(rope(), layers=2)
    with kit.refuses(f"{method.__name__}: statistics must be", "query_statistics"):
        method(200).compress(k, v)
    with kit.refuses(f"{method.__name__}: statistics must be", "query_statistics"):
        kvops.Cache(method(200))
    with kit.refuses("statistics must cover layer 2, got those of 2 layers"):
        method(200, statistics=statistics).compress(k, v, layer=2)
    with kit.refuses("statistics cover 2 layers, pass layer and num_layers"):
        method(200, statistics=statistics).compress(k, v)
    with kit.refuses("must cover the 3 layers that evict, got 2"):
        method(200, statistics=statistics).compress(k, v, layer=1, num_layers=3)
    statistics.save(tmp_path / "of.safetensors")
    policy = method(200, statistics=str(tmp_path / "of.safetensors"))
    given = dict(layer=1, num_layers=2)
    expected = method(200, statistics=statistics).compress(k, v, **given).indices
    assert torch.equal(policy.compress(k, v, **given).indices, expected)
    assert not torch.equal(policy.compress(k, v, layer=0, num_layers=2).indices, expected)
    (tmp_path / "other").write_text("no statistics")
    with kit.refuses("must be a safetensors file"):
        method(200, statistics=str(tmp_path / "other")).compress(k, v, **given)


def test_a_file_holds_everything(tmp_path):
    of = Rope(Rope.of(24).inv_freq, True, 1.5)
    q = [kit.randn(2, 6, 50, D, seed=i) for i in range(3)]
    saved = QueryStatistics.of(q, of, scale=0.3)
    saved.save(tmp_path / "x.safetensors")
    loaded = QueryStatistics.load(tmp_path / "x.safetensors")
    for name in ("mean", "cov", "norms"):
        assert all(map(torch.equal, getattr(saved, name), getattr(loaded, name)))
    assert torch.equal(loaded.rope.inv_freq, of.inv_freq)
    assert (loaded.rope.interleaved, loaded.rope.scaling, loaded.scale) == (True, 1.5, 0.3)


def test_statistics_of_queries():
    q = kit.randn(2, 6, 50, D)
    of = QueryStatistics.of(q, rope(pairs=5))
    each = q.double().transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(of.mean[0].double(), each.mean(1))
    torch.testing.assert_close(
        of.cov[0].double(), torch.stack([x.T.cov(correction=0) for x in each]), rtol=1e-5, atol=1e-6
    )
    norms = (each[..., :5] ** 2 + each[..., 5:10] ** 2).sqrt().mean(1)
    torch.testing.assert_close(of.norms[0].double(), norms)
    with kit.refuses("queries must be", r"\[6, 50, 32\]"):
        QueryStatistics.of(q[0], rope())
    with kit.refuses("layer 0 must have mean", "cov"):
        QueryStatistics(of.mean, [of.cov[0][:2]], of.norms, of.rope)


@pytest.mark.parametrize("form", ROPES)
def test_unrotated_undoes_the_rotation(form):
    of = rope(**ROPES[form])
    q = kit.randn(1, 4, 70, D)
    rotated = rotate(q, torch.arange(5, 75), of).float()
    torch.testing.assert_close(unrotated(rotated, of, torch.arange(5, 75)), q, rtol=1e-5, atol=1e-5)


def test_statistics_of_a_model():
    """Llama has no norms on queries, Qwen3 has: the statistics equal those of its projections and norms."""
    transformers = pytest.importorskip("transformers")
    import kvops.hf

    sizes = dict(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    for name in ("Llama", "Qwen3"):
        config = getattr(transformers, f"{name}Config")(**sizes, num_key_value_heads=2, head_dim=16)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        ids = torch.randint(50, (3, 40))
        queries, hooks = [[], []], []
        for i, layer in enumerate(model.model.layers):
            module = layer.self_attn.q_norm if name == "Qwen3" else layer.self_attn.q_proj
            hooks.append(
                module.register_forward_hook(lambda _, __, out, into=queries[i]: into.append(out.view(1, 40, 4, 16)))
            )
        before = model.config._attn_implementation
        found = kvops.hf.query_statistics(model, ids, skip=4)
        for hook in hooks:
            hook.remove()
        assert model.config._attn_implementation == before and len(found.mean) == 2
        for i in range(2):
            q = torch.cat(queries[i])[:, 4:].transpose(1, 2)
            expected = QueryStatistics.of(q, found.rope)
            for x in ("mean", "cov", "norms"):
                torch.testing.assert_close(getattr(found, x)[i], getattr(expected, x)[0], rtol=1e-4, atol=1e-5)
        with kit.refuses("ids must be", r"\[3, 4\]"):
            kvops.hf.query_statistics(model, ids[:, :4])


def test_statistics_of_answers(tmp_path, monkeypatch):
    """bench/experiments/query_statistics.py."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench/experiments"))
    import query_statistics

    query_statistics.main(["--file", str(tmp_path / "x.safetensors"), "--prompts", "2", "--context", "200"])
    found = QueryStatistics.load(tmp_path / "x.safetensors")
    assert all(x.isfinite().all() for x in found.mean) and len(found.mean) > 1


def test_a_model_by_name():
    """`for_model` calibrates once, and keeps statistics that are given."""
    transformers = pytest.importorskip("transformers")
    from kvops import demo
    from kvops.hf import KVCache, for_model

    model = transformers.AutoModelForCausalLM.from_pretrained(demo.MODEL)
    policy = for_model("expected-attention:budget=64", model)
    assert for_model(policy, model) is policy
    assert for_model("triattention:budget=256", model).statistics is policy.statistics
    assert for_model(kvops.KeyDiff(5), model) == kvops.KeyDiff(5)
    cache = KVCache(model.config, policy)
    with torch.no_grad():
        model(torch.randint(250, (1, 300)), past_key_values=cache)
    assert len(cache.layers[0].cache) == 64


# ---- statistics that are wrong, and their files ----


def small(**changes) -> dict:
    """Return the arguments of small statistics of two layers."""
    of = QueryStatistics.of([kit.randn(1, 2, 30, 8, seed=i) for i in range(2)], Rope.of(8))
    return dict(mean=of.mean, cov=of.cov, norms=of.norms, rope=of.rope, scale=0.5) | changes


def put(name, value, *where):
    """Return the arguments with one element changed, in the second layer."""
    given = small()
    layers = [x.clone() for x in given[name]]
    layers[1][where] = value
    return {name: layers}


WRONG = {  # a field, and changed arguments
    "mean NaN": ("mean of layer 1 must be .* not finite", lambda: put("mean", math.nan, 0, 3)),
    "mean inf": ("mean of layer 1 must be .* not finite", lambda: put("mean", math.inf, 0, 3)),
    "mean large": ("mean of layer 1 must be at most 1e.09", lambda: put("mean", 1e12, 0, 3)),
    "cov NaN": ("cov of layer 1 must be .* not finite", lambda: put("cov", math.nan, 0, 3, 4)),
    "cov large": ("cov of layer 1 must be at most 1e.18", lambda: put("cov", 1e20, 0, 3, 3)),
    "variance": ("variances in cov of layer 1 must be at least 0", lambda: put("cov", -1.0, 0, 3, 3)),
    "symmetric": ("cov of layer 1 must be symmetric", lambda: put("cov", 0.9, 0, 3, 4)),
    "norms NaN": ("norms of layer 1 must be .* not finite", lambda: put("norms", math.nan, 0, 3)),
    "norms": ("norms of layer 1 must be at least 0, got -1", lambda: put("norms", -1.0, 0, 3)),
    "frequencies": ("inv_freq must be in", lambda: dict(rope=Rope(torch.tensor([1.0, math.nan, 0.1, 0.1])))),
    "frequencies negative": ("inv_freq must be in", lambda: dict(rope=Rope(torch.tensor([1.0, -1.0, 0.1, 0.1])))),
    "frequencies dims": ("inv_freq must be", lambda: dict(rope=Rope(torch.ones(4, 1)))),
    "scaling": ("scaling must be in", lambda: dict(rope=Rope(torch.ones(4), scaling=0.0))),
    "scaling NaN": ("scaling must be finite", lambda: dict(rope=Rope(torch.ones(4), scaling=math.nan))),
    "scale": ("scale must be positive, got -0.5", lambda: dict(scale=-0.5)),
    "scale NaN": ("scale must be finite", lambda: dict(scale=math.nan)),
    "layers": ("must have one tensor per layer", lambda: dict(norms=small()["norms"][:1])),
    "dtype": ("mean of layer 0 must be torch.float32", lambda: dict(mean=[x.double() for x in small()["mean"]])),
    "no heads": ("layer 0 must have mean", lambda: {k: [x[:0] for x in small()[k]] for k in ("mean", "cov", "norms")}),
}
WRONG_TYPES = {
    "mean": ("mean must be a list of torch.Tensor", lambda: dict(mean=torch.ones(2, 2, 8))),
    "element": ("cov must be a list of torch.Tensor.* a list with float", lambda: dict(cov=[1.0, 2.0])),
    "rope": ("rope must be a kvops.Rope, got int", lambda: dict(rope=3)),
    "interleaved": ("interleaved must be a bool", lambda: dict(rope=Rope(torch.ones(4), interleaved=1))),
    "scaling": ("scaling must be a float", lambda: dict(rope=Rope(torch.ones(4), scaling="1"))),
    "scale": ("scale must be a float", lambda: dict(scale="1")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_statistics_are_refused(wrong, tmp_path, monkeypatch):
    """On construction, and in a file, whose name the message has too."""
    message, changes = WRONG[wrong]
    with pytest.raises(ValueError, match=f"QueryStatistics: .*{message}"):
        QueryStatistics(**small(**changes()))
    path = tmp_path / "x.safetensors"
    with monkeypatch.context() as unchecked:
        unchecked.setattr(QueryStatistics, "__post_init__", lambda self: None)
        QueryStatistics(**small(**changes())).save(path)
    name = "has no tensor norms.1" if wrong == "layers" else message
    if wrong != "dtype" and "dims" not in wrong:
        with pytest.raises(ValueError, match=f"QueryStatistics: .*x.safetensors .*{name}"):
            QueryStatistics.load(path)
        with pytest.raises(ValueError, match=f"QueryStatistics: .*x.safetensors .*{name}"):
            TriAttention(20, recent=4, statistics=str(path)).compress(*kit.kv(1, 1, 40, 8))


@pytest.mark.parametrize("wrong", WRONG_TYPES)
def test_statistics_of_wrong_types_are_refused(wrong):
    message, changes = WRONG_TYPES[wrong]
    with pytest.raises(TypeError, match=f"QueryStatistics: {message}"):
        QueryStatistics(**small(**changes()))


def test_wrong_queries_are_refused():
    q = kit.randn(1, 2, 30, 8)
    for queries, error in (
        ([], ValueError),
        ([3], TypeError),
        (3, TypeError),
        (q[..., :4], ValueError),
        (q.long(), ValueError),
        (q * math.nan, ValueError),
    ):
        with pytest.raises(error, match="QueryStatistics: "):
            QueryStatistics.of(queries, Rope.of(8))
    with pytest.raises(TypeError, match="QueryStatistics: rope must be"):
        QueryStatistics.of(q, 3)


def parts(path) -> tuple[dict, bytes]:
    """Return the header and the data of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write(path, header: str, data: bytes) -> None:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


FUZZ = 50  # with 1,000, 24,000 files have been tried
JSON = [None, True, 0, -1, 3, 10**9, 10**400, 1e308, math.nan, math.inf, "x", "1", [], {}, [[]], {"layers": 2}]


def test_files_that_are_changed_anywhere(tmp_path):
    """Every file is loaded or refused with a ValueError that names it."""
    good, path = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    QueryStatistics(**small()).save(good)
    whole, random = good.read_bytes(), Random(0)
    header, data = parts(good)
    settings = json.loads(header["__metadata__"]["settings"])
    refused = loaded = 0

    def check() -> None:
        nonlocal refused, loaded
        try:
            QueryStatistics.load(path)
            loaded += 1
        except ValueError as error:
            assert str(error).startswith(f"QueryStatistics: {path} ") and len(str(error)) < 1000
            refused += 1

    for _ in range(15 * FUZZ):
        changed = bytearray(whole)
        for _ in range(random.choice((1, 1, 4))):
            changed[random.randrange(len(changed))] = random.randrange(256)
        path.write_bytes(changed)
        check()
    for _ in range(3 * FUZZ):
        cut, size = random.randrange(len(whole)), random.randrange(40)
        path.write_bytes(random.choice((whole[:cut], whole[:cut] + random.randbytes(size) + whole[cut:])))
        check()
    for _ in range(6 * FUZZ):
        changed = copy.deepcopy(header)
        name = random.choice(sorted(changed))
        what = random.randrange(4)
        if what == 0:
            del changed[name]
        elif what == 1:
            changed[random.choice((name + "1", "mean.2", "inv_freq"))] = changed.pop(name)
        elif what == 2:
            changed[name][random.choice(sorted(changed[name]))] = random.choice((*JSON, "F16", "BF16", "I32", [2, 8]))
        else:
            changed[name] = random.choice(JSON)
        write(path, json.dumps(changed), data)
        check()
    for name in (*settings, "more", None):
        for value in JSON:
            changed = {**settings, name: value} if name else value
            header["__metadata__"]["settings"] = json.dumps(changed)
            write(path, json.dumps(header), data)
            check()
    for text in ("[" * 10**5 + "]" * 10**5, '{"layers":' * 10**4 + "1" + "}" * 10**4, "1" * 5000, "{", ""):
        header["__metadata__"]["settings"] = text
        write(path, json.dumps(header), data)
        check()
    assert refused > 8 * FUZZ and loaded > FUZZ


def test_files_that_are_none(tmp_path):
    policy = TriAttention(20, recent=4, statistics=str(tmp_path))
    with pytest.raises(ValueError, match=f"QueryStatistics: {tmp_path} must be a file, got a folder"):
        policy.compress(*kit.kv(1, 1, 40, 8))
    with pytest.raises(ValueError, match=f"QueryStatistics: {tmp_path} must be a file, got a folder"):
        QueryStatistics.load(tmp_path)
    for missing in (tmp_path / "none", str(tmp_path / "none")):
        with pytest.raises(FileNotFoundError, match="QueryStatistics: there is no file .*none"):
            QueryStatistics.load(missing)
        with pytest.raises(FileNotFoundError, match="TriAttention: statistics must be the path of a file.*none"):
            TriAttention(20, recent=4, statistics=missing).compress(*kit.kv(1, 1, 40, 8))
    with pytest.raises(ValueError, match="TriAttention: statistics must be the path of a file"):
        TriAttention(20, recent=4, statistics="a\0b").compress(*kit.kv(1, 1, 40, 8))
    with pytest.raises(TypeError, match="QueryStatistics: path must be"):
        QueryStatistics.load(3)


def test_threads_read_files_while_they_change(tmp_path):
    """Each call sees a complete version of its file, and none older than the last that was written before it."""
    paths = [tmp_path / f"{i}.safetensors" for i in range(6)]
    of = small()

    def save(path, version):
        QueryStatistics(**of | {"scale": float(version)}).save(path)

    for path in paths:
        save(path, 1)
    stop, errors = threading.Event(), []

    def read(seed):
        random = Random(seed)
        try:
            while not stop.is_set():
                found = resolved("test", str(random.choice(paths)))
                assert len(found.mean) == 2 and found.scale >= 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for version in range(2, 60):
        path = paths[version % 3]
        save(path, version)
        assert resolved("test", path).scale == version
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors and len(list(tmp_path.iterdir())) == 6
    assert resolved("test", paths[5]) is resolved("test", str(paths[5]))
