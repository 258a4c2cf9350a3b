"""KVzap and learned gates: scores, fits and files against formulas in fp64, caches against single calls."""

import copy
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import kit
import kvops
from kvops.eval.identity import digest

pytestmark = kit.every_device
LAYERS, HEADS, SIZE, WIDTH = 3, 2, 24, 5


def linear_gates(seed=0, layers=LAYERS):
    return kvops.Gates([[kit.randn(HEADS, SIZE, seed=seed + i), kit.randn(HEADS, seed=9 + i)] for i in range(layers)])


def deep_gates(seed=0):
    shapes = (WIDTH, SIZE), (WIDTH,), (HEADS, WIDTH), (HEADS,)
    return kvops.Gates([[kit.randn(*x, seed=seed + 4 * i + j) for j, x in enumerate(shapes)] for i in range(LAYERS)])


SHAPES = (HEADS * 3 * 4, SIZE), (HEADS * 3 * 4,), (HEADS * 4, SIZE), (4,), (4,), (HEADS, 1, 5, 4), (HEADS, 1, 3)


def sink_gates(seed=0):
    """Of three queries for each KV head, four channels, five sinks."""
    return kvops.Gates([[kit.randn(*x, seed=seed + 7 * i + j) for j, x in enumerate(SHAPES)] for i in range(LAYERS)])


def weight_beside_sinks(tensors, x):
    """The weight of a token in a softmax over its own key and those of the sinks: fp64 [b, Hk, t]."""
    w_q, b_q, w_k, q_norm, k_norm, k_base, b = (y.double() for y in tensors)
    total = 0
    for g in range(b.shape[2]):
        heads = []
        for h in range(len(b)):
            q, k = (
                (y * y.square().mean(-1, keepdim=True).add(1e-6).rsqrt())
                for y in (
                    (x @ w_q.mT + b_q).unflatten(-1, (len(b), -1, 4))[..., h, g, :],
                    (x @ w_k.mT).unflatten(-1, (len(b), 4))[..., h, :],
                )
            )
            q, k = q * q_norm, k * k_norm
            own = (q * k).sum(-1) / 2 + b[h, 0, g]
            heads.append(1 / (1 + (q @ k_base[h, 0].mT / 2 - own[..., None]).exp().sum(-1)))
        total = total + torch.stack(heads, 1)
    return total / b.shape[2]


def formula(gates, layer, hidden):
    """[b, Hk, t] in fp64."""
    maps = [x.double() for x in gates.layers[layer]]
    if len(maps) == 7:
        return weight_beside_sinks(maps, hidden.double()).log()
    x = hidden.double() @ maps[0].mT + maps[1]
    if len(maps) == 4:
        x = x * 0.5 * (1 + torch.erf(x / 2**0.5))
        x = x @ maps[2].mT + maps[3]
    return x.transpose(1, 2)


GATES = linear_gates()
KINDS = {"linear": GATES, "two maps": deep_gates(), "sinks": sink_gates()}
each_kind = pytest.mark.parametrize("gates", KINDS.values(), ids=KINDS)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores(gates, dtype):
    hidden = kit.randn(2, 5000, SIZE).to(dtype)  # more than are scored at a time
    for layer in range(LAYERS):
        scores = gates.scores(hidden, layer)
        assert scores.shape == (2, HEADS, 5000) and scores.dtype == torch.float32 and scores.is_contiguous()
        torch.testing.assert_close(scores.double(), formula(gates, layer, hidden), atol=2e-5, rtol=1e-5)


@each_kind
def test_files(gates, tmp_path):
    path = tmp_path / "gates.safetensors"
    gates.save(path)
    read = kvops.Gates.load(path)
    assert all(torch.equal(x, y) for a, b in zip(read.layers, gates.layers) for x, y in zip(a, b))
    names = {2: {"0.weight", "0.bias"}, 4: {"2.2.bias", "1.0.weight"}, 7: {"0.k_base", "2.b", "1.q_proj.bias"}}
    assert {f"layers.{x}" for x in names[len(gates.layers[0])]} < set(load_file(path))
    assert repr(read) == repr(gates)
    policy = kvops.policy(f"kvzap:budget=20,recent=4,gates={path}")
    assert policy == kvops.KVzap(20, recent=4, gates=path)  # both have the file's one version
    assert policy.gates.layers[0][0].equal(gates.layers[0][0])


def test_a_published_file(tmp_path):
    """The names in a KVzap model are those of its modules."""
    modules = torch.nn.Module()
    modules.layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(SIZE, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, HEADS))
        for _ in range(12)
    ).bfloat16()
    path = tmp_path / "model.safetensors"
    save_file(modules.state_dict(), path)
    gates, hidden = kvops.Gates.load(path), kit.randn(1, 7, SIZE)
    with torch.no_grad():
        for i in (0, 2, 11):
            want = modules.layers[i].double()(hidden.double().cpu())[0].mT
            torch.testing.assert_close(gates.scores(hidden, i)[0].double().cpu(), want, atol=1e-5, rtol=1e-5)


def test_a_published_attention_to_sinks(tmp_path):
    """A pickled list of the states of modules, as their authors store it, made a file of safetensors."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = torch.nn.Linear(SIZE, HEADS * 12), torch.nn.Linear(SIZE, HEADS * 4, bias=False)
            self.q_norm, self.k_norm = torch.nn.RMSNorm(4, eps=1e-6), torch.nn.RMSNorm(4, eps=1e-6)
            self.k_base = torch.nn.Parameter(torch.randn(HEADS, 1, 5, 4))
            self.b = torch.nn.Parameter(torch.randn(HEADS, 1, 3))

    modules = [Module() for _ in range(11)]
    published, path = [x.state_dict() for x in modules], tmp_path / "gates.safetensors"
    save_file({f"layers.{i}.{name}": x for i, layer in enumerate(published) for name, x in layer.items()}, path)
    gates, hidden = kvops.Gates.load(path), kit.randn(2, 7, SIZE)
    assert repr(gates) == "Gates(11 layers: 24 -> 4 beside 5 sinks -> 2)"
    with torch.no_grad():
        for i in (0, 2, 10):
            x, own = hidden.double().cpu(), modules[i].double()
            q = own.q_norm(own.q_proj(x).unflatten(-1, (HEADS, 3, 4)))
            k = own.k_norm(own.k_proj(x).unflatten(-1, (HEADS, 1, 4)))
            keys = torch.cat((k, own.k_base[:, 0].expand(2, 7, -1, -1, -1)), 3)  # [b, t, Hk, 1 + sinks, 4]
            logits = q @ keys.mT / 2
            logits[..., 0] += own.b[:, 0]
            want = logits.softmax(-1)[..., 0].mean(-1).transpose(1, 2)
            torch.testing.assert_close(gates.scores(hidden, i).double().cpu().exp(), want, atol=1e-6, rtol=1e-5)


def test_wrong_files(tmp_path):
    path = tmp_path / "wrong"
    good = {name: x.cpu() for name, x in GATES._named()}
    for tensors, says in (
        ({"weights": torch.ones(2)}, r"expected layers.<i>.., got tensor 'weights'"),
        ({**good, "more": torch.ones(2)}, "got tensor 'more'"),
        ({name: x for name, x in good.items() if "1." not in name}, "does not hold gates: expected"),
        ({name: x for name, x in good.items() if name != "layers.1.bias"}, "layer 1 must have tensors"),
        ({name.replace("0.", "0.4."): x for name, x in good.items()}, "does not hold gates: expected"),
        ({name: x * torch.nan for name, x in good.items()}, "layer 0 must be finite in fp32"),
        ({}, "does not hold gates"),
    ):
        save_file(tensors, path)
        with kit.refuses(rf"KVzap: gates='{path}': Gates: {path} does not hold gates: ", says):
            kvops.KVzap(20, gates=path)
    path.write_text("no safetensors")
    with kit.refuses("must be a safetensors file"):
        kvops.Gates.load(path)
    with pytest.raises(FileNotFoundError, match="KVzap: gates must be the path of a file"):
        kvops.KVzap(20, gates=tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        kvops.Gates.load(tmp_path / "none")


def test_wrong_gates():
    w, b = torch.ones(HEADS, SIZE), torch.ones(HEADS)
    for layers, says, kind in (
        ([], "layers must be a list", TypeError),
        ([[w, 3]], "layer 0 must be a list of torch.Tensor", TypeError),
        ([[w, b], [w]], r"layer 1 must have tensors .* got \[\[2, 24\]\]", ValueError),
        ([[w, w]], "layer 0 must have tensors", ValueError),
        ([[*sink_gates().layers[0][:6], torch.ones(HEADS, 1, 2)]], "layer 0 must have tensors", ValueError),
        ([[*sink_gates().layers[0][:5], torch.ones(HEADS, 5, 4), b]], "layer 0 must have tensors", ValueError),
        ([[*[torch.ones(0)] * 7]], "layer 0 must have tensors .* or the 7 of an attention to sinks", ValueError),
        ([[w, b, w, b]], "layer 0 must have tensors", ValueError),
        ([[w.int(), b]], "layer 0 must be dense fp64, fp32, fp16 or bf16", ValueError),
    ):
        with kit.refuses(f"Gates: {says}", kind=kind):
            kvops.Gates(layers)
    for hidden, layer, says in (
        (torch.ones(1, 3, SIZE), LAYERS, "layer must be one of the 3 with a gate, got 3"),
        (torch.ones(1, 3, SIZE + 1), 0, r"hidden must be floating point \[b, t, 24\]"),
        (torch.ones(3, SIZE), 0, r"hidden must be floating point"),
    ):
        with kit.refuses(f"Gates: {says}"):
            GATES.scores(hidden, layer)


# ---- fits ----


def test_linear_gates_are_ridge_regressions():
    x, y = kit.randn(400, SIZE, seed=1) * 3 + 1, kit.randn(400, HEADS, seed=2)
    fitted = kvops.fit_gates([x, x.bfloat16()], [y, y], ridge=0.1)
    for layer, kind in enumerate((x, x.bfloat16())):
        z, t = kind.double() - kind.double().mean(0), y.double() - y.double().mean(0)
        penalty = 0.1 * z.square().sum() / SIZE
        weight = torch.linalg.inv(z.mT @ z + penalty * torch.eye(SIZE, device=z.device)) @ z.mT @ t
        bias = y.double().mean(0) - kind.double().mean(0) @ weight
        torch.testing.assert_close(fitted.layers[layer][0].double(), weight.mT.cpu(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(fitted.layers[layer][1].double(), bias.cpu(), atol=1e-6, rtol=1e-5)


def test_fits_find_what_scores_were_made_by():
    x = kit.randn(20000, SIZE) * torch.linspace(0.1, 4, SIZE) + 2
    scores = formula(GATES, 1, x[None])[0].mT.float()
    fitted = kvops.fit_gates([x], [scores], ridge=1e-9)
    torch.testing.assert_close(fitted.scores(x[None], 0)[0].mT.cpu(), scores.cpu(), atol=1e-3, rtol=1e-3)
    bent = formula(deep_gates(), 1, (x[None] - 2) / 3)[0].mT.float()
    state = torch.get_rng_state()
    for width, least, most in ((None, 0.0, 0.9), (32, 0.95, 1.0)):
        found = kvops.fit_gates([x], [bent], width=width).scores(x[None], 0)[0].mT.cpu()
        r2 = 1 - (found - bent.cpu()).square().sum(0) / (bent - bent.mean(0)).square().sum(0).cpu()
        assert least < r2.min() <= r2.max() < most
    assert torch.equal(torch.get_rng_state(), state)
    again, other = (kvops.fit_gates([x[:600]], [bent[:600]], width=8, seed=s) for s in (3, 4))
    assert again.layers[0][0].equal(kvops.fit_gates([x[:600]], [bent[:600]], width=8, seed=3).layers[0][0])
    assert not again.layers[0][0].equal(other.layers[0][0])


def test_fits_beside_sinks():
    """They find what scores were made by, of hidden states of any size, with the same numbers for the same seed."""
    x = kit.randn(12000, SIZE) * torch.linspace(0.1, 4, SIZE) + 0.5
    x[:, 3] = 0.0
    scores = formula(sink_gates(), 1, x[None])[0].mT.float()
    state = torch.get_rng_state()
    linear = kvops.fit_gates([x], [scores])
    fitted = kvops.fit_gates([x], [scores], width=4, sinks=5, group=3)
    r2 = []
    for gates in (linear, fitted):
        found = gates.scores(x[None], 0)[0].mT.cpu()
        r2.append(1 - (found - scores.cpu()).square().sum(0) / (scores - scores.mean(0)).square().sum(0).cpu())
    assert (r2[1] > 0.5).all() and (r2[1] > r2[0] + 0.3).all()
    assert torch.equal(torch.get_rng_state(), state)
    assert [list(y.shape) for y in fitted.layers[0]] == [list(y) for y in SHAPES]
    small = kvops.fit_gates([x[:2000] * 1e-4], [scores[:2000]], width=4, sinks=5, group=3)
    large = kvops.fit_gates([x[:2000]], [scores[:2000]], width=4, sinks=5, group=3)
    torch.testing.assert_close(small.scores(x[None] * 1e-4, 0), large.scores(x[None], 0), atol=0.05, rtol=0)


def test_wrong_fits():
    x, y = torch.ones(10, SIZE), torch.ones(10, HEADS)
    fitted = kvops.fit_gates([x], [y])  # without any variance
    torch.testing.assert_close(fitted.scores(x[None], 0), torch.ones(1, HEADS, 10))
    assert kvops.fit_gates([x], [y], width=2).scores(x[None], 0).isfinite().all()
    for args, options, says, kind in (
        ((x, y), {}, "hidden must be a list of torch.Tensor", TypeError),
        (([x], [y, y]), {}, "hidden and scores must have the same layers, got 1 and 2", ValueError),
        (([], []), {}, "hidden and scores must have the same layers", ValueError),
        (([x], [y[:5]]), {}, "layer 0 must have hidden", ValueError),
        (([x], [y * torch.nan]), {}, "hidden and scores of layer 0 must be finite fp64, fp32", ValueError),
        (([x], [y]), dict(ridge=0), "ridge must be greater than 0, got 0", ValueError),
        (([x], [y]), dict(width=0), "width must be at least 1", ValueError),
        (([x], [y]), dict(seed=-1), "seed must be at least 0", ValueError),
        (([x], [y]), dict(sinks=-1, width=2), "sinks must be at least 0", ValueError),
        (([x], [y]), dict(sinks=2), "an attention to sinks needs width and sinks, got width=None, sinks=2", ValueError),
        (([x], [y]), dict(group=2, width=4), "an attention to sinks needs width and sinks", ValueError),
    ):
        with kit.refuses(f"fit_gates: {says}", kind=kind):
            kvops.fit_gates(*args, **options)


@each_kind
def test_the_threshold_that_keeps_a_fraction(gates):
    hidden = [kit.randn(500, SIZE, seed=i) * (i + 1) for i in range(LAYERS)]
    scores = torch.cat([gates.scores(x[None], i).flatten() for i, x in enumerate(hidden)])
    for keep, count in ((0.25, 750), (1.0, 3000), (0.001, 3)):
        tau = gates.threshold(hidden, keep)
        assert (scores >= tau).sum() == count
    for args, says, kind in (
        ((hidden[0], 0.5), "hidden must be a list of torch.Tensor", TypeError),
        ((hidden[:2], 0.5), r"hidden must be .* for each of the 3 layers", ValueError),
        ((hidden, 1.5), "keep must be in", ValueError),
        ((hidden, 0.0), "keep must be in .* at least one of 3000 scores", ValueError),
    ):
        with kit.refuses(f"Gates: {says}", kind=kind):
            gates.threshold(*args)


# ---- the policy ----


def best(scores, count, sinks, recent):
    """The slots of one head that are kept."""
    scores = scores.clone()
    scores[:sinks] = torch.inf
    scores[max(0, len(scores) - recent) :] = torch.inf
    order = sorted(range(len(scores)), key=lambda j: (-scores[j].item(), j))
    return sorted(order[:count])


def test_single_calls():
    k, v = kit.kv(2, HEADS, 60, 16)
    hidden = kit.randn(2, 60, SIZE)
    policy = kvops.KVzap(20, gates=GATES, sinks=2, recent=5)
    got = policy.compress(k, v, hidden, layer=1)
    want = GATES.scores(hidden, 1)
    for b in range(2):
        for h in range(HEADS):
            assert got.indices[b, h].tolist() == best(want[b, h], 20, 2, 5)
    same = kvops.kvzap_compress(k, v, hidden, 20, gates=GATES, sinks=2, recent=5, layer=1)
    assert kit.same(same, got)
    swapped = policy.compress(k.transpose(1, 2), v.transpose(1, 2), hidden, layer=1, layout="bnhd")
    assert torch.equal(swapped.indices, got.indices)
    one = replace(policy, gates=linear_gates(layers=1))
    assert torch.equal(one.compress(k, v, hidden).indices, policy.compress(k, v, hidden, layer=0).indices)
    starts = kit.int32(0, 25)
    padded = policy.compress(k, v, hidden, layer=1, starts=starts)
    assert padded.indices[1, 0].tolist() == [25 + x for x in best(want[1, 0, 25:], 20, 2, 5)]


@pytest.mark.parametrize("budget", [1.0, 30])
@pytest.mark.parametrize("pads", [None, [0, 30]])
def test_thresholds(budget, pads):
    k, v = kit.kv(2, HEADS, 80, 16)
    hidden = kit.randn(2, 80, SIZE)
    policy = kvops.KVzap(budget, gates=GATES, sinks=2, recent=5, threshold=1.5, head_mode="adaptive")
    options = {} if pads is None else dict(starts=kit.int32(*pads))
    got = policy.compress(k, v, hidden, layer=2, **options)
    scores = GATES.scores(hidden, 2)
    shared = replace(policy, threshold=None, budget=80 if budget == 1.0 else budget)
    most = (shared.compress(k, v, hidden, layer=2, **options).indices >= 0).sum(-1)
    counts = []
    for b in range(2):
        first = 0 if pads is None else pads[b]
        for h in range(HEADS):
            own = scores[b, h, first:]
            inner = own[2:-5]
            count = min(7 + int((inner >= 1.5).sum()), int(most[b, h]))
            kept = [x for x in got.indices[b, h].tolist() if x >= 0]
            assert kept == [first + x for x in best(own, count, 2, 5)]
            counts.append(count)
    assert len(set(counts)) > 1 and max(counts) < 80
    cache = kvops.Cache(policy, layer=2, num_layers=LAYERS)
    if pads is not None:
        cache.set_pads(kit.int32(*pads))
    cache.append(k, v, inputs=kvops.LayerInputs(hidden))
    assert torch.equal(cache.positions, got.indices[:, :, : len(cache)])
    every = replace(policy, threshold=-1e9, budget=1.0).compress(k, v, hidden, layer=2, **options).indices
    assert every.shape[2] == 80 - (0 if pads is None else min(pads))
    none = replace(policy, threshold=1e9).compress(k, v, hidden, layer=2, **options).indices
    assert none.shape[2] == 7
    short = policy.compress(k[:, :, :4], v[:, :, :4], hidden[:, :4], layer=2).indices
    assert short.tolist() == [[[0, 1, 2, 3]] * HEADS] * 2


def test_wrong_settings():
    k, v = kit.kv(1, HEADS, 20, 16)
    hidden = kit.randn(1, 20, SIZE)
    adaptive = dict(gates=GATES, recent=4, head_mode="adaptive")
    for make, says, kind in (
        (lambda: kvops.KVzap(20, gates=3), "gates must be a kvops.Gates or the path of their file, got int", TypeError),
        (lambda: kvops.KVzap(20, gates=GATES, recent=17), "budget must hold", ValueError),
        (lambda: kvops.KVzap(20, gates=GATES, recent=4, threshold=-4.0), "head_mode='adaptive'", ValueError),
        (lambda: kvops.KVzap(20, **{**adaptive, "recent": 0.1}, threshold=-4.0), "recent in tokens", ValueError),
        (lambda: kvops.KVzap(20, **adaptive, threshold=torch.inf), "threshold must be", ValueError),
        (lambda: kvops.Cache(kvops.KVzap(20, recent=4)), "gates must be a kvops.Gates of the model", ValueError),
        (lambda: kvops.Cache(kvops.KVzap(20, **adaptive)), "gates must be those of the 1 layers", ValueError),
        (lambda: kvops.KVzap(9, recent=4).compress(k, v, hidden), "gates must be a kvops.Gates of the", ValueError),
        (lambda: kvops.KVzap(9, **adaptive).compress(k, v, hidden), "layer must name one of", TypeError),
        (lambda: kvops.KVzap(9, **adaptive).compress(k, v, hidden[:, 1:], layer=0), "hidden must be", ValueError),
        (lambda: kvops.KVzap(9, **adaptive).compress(k[:, :1], v[:, :1], hidden, layer=0), "must score 1", ValueError),
    ):  # fmt: skip
        with kit.refuses(f"KVzap: .*{says}", kind=kind):
            make()


# ---- caches ----

POLICIES = [
    kvops.KVzap(20, gates=GATES, sinks=5, recent=3, buffer=4, head_mode="adaptive"),
    kvops.KVzap(1.0, gates=GATES, sinks=5, recent=3, buffer=4, head_mode="adaptive", threshold=0.5),
    kvops.KVzap(20, gates=GATES, sinks=2, recent=3, buffer=4),
    kvops.KVzap(0.4, gates=deep_gates(), recent=3, buffer=5),
    kvops.KVzap(20, gates=GATES, sinks=2, recent=3, buffer=4, head_mode="shared"),
    kvops.KVzap(20, gates=GATES, sinks=2, recent=3, buffer=4, head_mode="adaptive"),
    kvops.KVzap(0.4, gates=GATES, sinks=1, recent=3, buffer=None, head_mode="adaptive"),
    kvops.KVzap(1.0, gates=GATES, sinks=1, recent=3, buffer=6, head_mode="adaptive", threshold=0.5),
    kvops.KVzap(24, gates=deep_gates(), sinks=1, recent=3, buffer=2, head_mode="adaptive", threshold=0.1),
]


class Text:
    """A text of a layer, and a cache that reads it."""

    def __init__(self, policy, pads=None, tokens=140):
        self.q, (self.k, self.v) = kit.randn(2, 2 * HEADS, tokens, 16, seed=3), kit.kv(2, HEADS, tokens, 16)
        self.hidden = kit.randn(2, tokens, SIZE, seed=5)
        self.cache = kvops.Cache(policy, layer=1, num_layers=LAYERS)
        if pads is not None:
            self.cache.set_pads(kit.int32(*pads))

    def step(self, t):
        at = slice(self.cache.seen, self.cache.seen + t)
        q, k, v = (x[:, :, at] for x in (self.q, self.k, self.v))
        return self.cache.attend(q, k, v, inputs=kvops.LayerInputs(self.hidden[:, at]))

    def check(self):
        """Every slot has the score of its token."""
        cache, scores = self.cache, self.cache.policy.gates.scores(self.hidden, 1)
        kept = 0 if cache._kept is None else cache._kept.shape[2]
        held = cache.state["scores"]
        new = torch.arange(cache._evicted_at, cache.seen, device=held.device).expand(2, HEADS, -1)
        positions = new if cache._kept is None else torch.cat((cache._kept, new), 2)
        assert held.shape[2] == kept + cache.seen - cache._evicted_at
        want = scores.gather(2, positions.clamp(min=0))
        torch.testing.assert_close(held.where(positions >= 0, 0), want.where(positions >= 0, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
@kit.examples(6)
@given(
    sizes=st.lists(st.sampled_from((1, 1, 1, 1, 1, 3, 9, 30)), min_size=8, max_size=40),
    pads=st.sampled_from((None, [0, 7], [45, 0], [0, 38])),
)
def test_steps_keep_what_the_scores_of_all_tokens_say(policy, sizes, pads):
    text = Text(policy, pads)
    cache, scores = text.cache, policy.gates.scores(text.hidden, 1)
    held = None  # the positions of each head before a step
    for t in (40, *sizes):
        t = min(t, 140 - cache.seen)
        if not t:
            break
        evicted_at, first = cache._evicted_at, cache.seen
        text.step(t)
        text.check()
        now = [[[x for x in row if x >= 0] for row in heads] for heads in cache.positions.tolist()]
        if held is not None:
            for b in range(2):
                for h in range(HEADS):
                    have = held[b][h] + list(range(first, first + t))
                    assert set(now[b][h]) <= set(have)
                    if cache._evicted_at == evicted_at:
                        assert now[b][h] == have
                    elif policy.head_mode != "shared":
                        lost = set(have) - set(now[b][h])
                        pad = 0 if pads is None else pads[b]
                        real = [x for x in have if x >= pad]
                        inner = real[policy.sinks : len(real) - policy.recent]
                        assert lost <= set(inner) | set(range(pad))
                        dropped, stayed = (
                            [scores[b, h, x].item() for x in inner if (x in lost) == y] for y in (True, False)
                        )
                        if dropped and stayed:
                            assert max(dropped) <= min(stayed)
                        if policy.threshold is not None:
                            assert all(x >= policy.threshold for x in stayed)
                            if policy.budget == 1.0:
                                assert all(x < policy.threshold for x in dropped)
        held = now


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_rows_beams_and_crops(policy):
    text = Text(policy)
    text.step(60)
    cache = text.cache
    for _ in range(3):
        text.step(1)
    if cache._evicted_at < cache.seen - 1:
        cache.crop(cache.seen - 1)
        text.check()
        text.step(1)
    cache.reorder(torch.tensor([1, 0]))
    for name in ("q", "k", "v", "hidden"):
        setattr(text, name, getattr(text, name).flip(0))
    for _ in range(20):
        text.step(1)
        text.check()
    cache.freeze()
    out = text.step(2)
    assert out.isfinite().all()


def test_tokens_that_are_always_kept_may_score_nan():
    k, v = kit.kv(1, HEADS, 40, 16)
    hidden = kit.randn(1, 40, SIZE)
    policy = kvops.KVzap(1.0, gates=GATES, sinks=2, recent=3, threshold=0.5, head_mode="adaptive")
    want = policy.compress(k, v, hidden, layer=1).indices
    for value in (torch.nan, torch.inf):
        broken = hidden.clone()
        broken[:, [0, 38]] = value
        assert torch.equal(policy.compress(k, v, broken, layer=1).indices, want)
    with kit.refuses("Gates: hidden must be finite, got NaN among the scores"):
        GATES.threshold([hidden[0] * torch.nan] * LAYERS, 0.5)


def test_an_empty_batch_and_a_single_token():
    k, v = kit.kv(2, HEADS, 40, 16)
    hidden = kit.randn(2, 9, SIZE)
    alone = GATES.scores(hidden[:, 4:5], 1)
    torch.testing.assert_close(alone, GATES.scores(hidden, 1)[:, :, 4:5])
    one = kvops.KVzap(8, gates=GATES).compress(k[:, :, :1], v[:, :, :1], hidden[:, :1], layer=0, layout="bhnd")
    assert one.indices.tolist() == [[[0]] * HEADS] * 2
    kept = kvops.KVzap(8, gates=GATES).compress(k[:0], v[:0], kit.randn(2, 40, SIZE)[:0], layer=0)
    assert kept.indices.shape == (0, HEADS, 8)


def test_copies(tmp_path):
    """Equal gates are equal, used or not, and copies carry nothing else; caches go on after pickle as after a copy."""
    gates = linear_gates()
    size = len(pickle.dumps(gates))
    gates.scores(kit.randn(1, 3, SIZE), 1)
    assert len(pickle.dumps(gates)) == size and digest(gates) == digest(linear_gates())
    policy = replace(POLICIES[2], gates=gates)
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), replace(policy, gates=linear_gates())):
        assert twin == policy and hash(twin) == hash(policy)
    assert replace(policy, gates=deep_gates()) != policy != replace(policy, gates=linear_gates(1))
    for policy in POLICIES:
        text = Text(policy)
        text.step(50)
        for _ in range(7):
            text.step(1)
            twins = [pickle.loads(pickle.dumps(text.cache)), copy.deepcopy(text.cache)]
            at = slice(text.cache.seen, text.cache.seen + 1)
            now = [x[:, :, at] for x in (text.q, text.k, text.v)]
            outs = [
                x.attend(*now, inputs=kvops.LayerInputs(text.hidden[:, at])) for x in (*twins, copy.copy(text.cache))
            ]
            assert kit.same(outs[0], outs[1]) and kit.same(outs[0], outs[2])


def test_autocast():
    hidden = kit.randn(2, 600, SIZE)
    scores = [x.mT for x in formula(GATES, 1, hidden).float()]
    own = GATES.scores(hidden, 1)
    want = kvops.fit_gates([hidden[0]], [scores[0]]), kvops.fit_gates([hidden[0]], [scores[0]], width=4)
    with torch.autocast(hidden.device.type, torch.bfloat16):
        assert torch.equal(GATES.scores(hidden, 1), own)
        found = kvops.fit_gates([hidden[0]], [scores[0]]), kvops.fit_gates([hidden[0]], [scores[0]], width=4)
    assert found == want


def test_fits_of_constant_channels_and_any_scale():
    x = kit.randn(4000, SIZE)
    scores = formula(deep_gates(), 1, x[None])[0].mT.float()

    def explained(x, scores):
        found = kvops.fit_gates([x], [scores], width=8).scores(x[None], 0)[0].mT
        return 1 - (found - scores).square().sum(0) / (scores - scores.mean(0)).square().sum(0)

    want = explained(x, scores)
    assert want.min() > 0.5
    constant = x.clone()
    constant[:, 3] = 1000.0
    plain = x.clone()
    plain[:, 3] = 0.0
    torch.testing.assert_close(explained(constant, scores), explained(plain, scores), atol=1e-3, rtol=0)
    for of_x, of_y in ((1e-8, 1.0), (1.0, 1e-8), (1e4, 1e4)):
        torch.testing.assert_close(explained(x * of_x, scores * of_y), want, atol=0.02, rtol=0)


@dataclass(frozen=True, eq=False)
class Positions(kvops.KeyPolicy):
    """Remembers the position of each token, and keeps those whose position is a multiple of 3, the newest last."""

    needs = kvops.Needs(per_slot=("at",))

    def remember(self, view):
        new = view.positions()[:, :, -view.new :].float()
        seen = view.state.get("at")
        view.state["at"] = new if seen is None else torch.cat((seen, new), 2)

    def scores(self, view):
        at = view.state["at"]
        return at - 1000 * (at % 3 != torch.arange(view.heads, device=at.device)[:, None])


@pytest.mark.parametrize("mode", ["per_head", "adaptive"])
def test_what_is_remembered_sees_positions_and_drafts(mode):
    """Also while a cache is frozen, as with drafted tokens, of which some are taken back."""
    (k, v), q = kit.kv(2, HEADS, 90, 16), kit.randn(2, 2 * HEADS, 90, 16)
    policy = Positions(12, buffer=3, head_mode=mode)
    cache, plain = kvops.Cache(policy), kvops.Cache(policy)
    for x in (cache, plain):
        x.attend(q[:, :, :40], k[:, :, :40], v[:, :, :40])
    while cache.seen < 80:
        cache.frozen = True
        at = slice(cache.seen, cache.seen + 4)
        cache.attend(q[:, :, at], k[:, :, at], v[:, :, at])
        cache.crop(cache.seen - 3)
        cache.frozen = False
        cache.catch_up()
        at = slice(plain.seen, plain.seen + 1)
        plain.attend(q[:, :, at], k[:, :, at], v[:, :, at])
        assert torch.equal(cache.positions, plain.positions)
    assert cache._evicted_at > 70


def test_keep_of_a_frozen_cache():
    text = Text(POLICIES[2])
    text.step(15)
    text.cache.freeze()
    text.step(4)
    with kit.refuses(r"KVzap: keep\(\) expected 'scores' of all 19 tokens, got those of 15"):
        text.cache.keep(torch.arange(3))


def test_a_threshold_evicts_in_decode_when_the_buffer_is_full():
    text = Text(POLICIES[7])
    text.step(40)
    lengths = [text.cache.lengths]
    for _ in range(24):
        text.step(1)
        lengths.append(text.cache.lengths)
    grown = [bool((b == a + 1).all()) for a, b in zip(lengths, lengths[1:])]
    assert grown == ([True] * 5 + [False]) * 4
    scores = text.cache.policy.gates.scores(text.hidden[:, :64], 1)
    inner = scores[:, :, 1:61] >= 0.5
    assert torch.equal(text.cache.lengths, 1 + 3 + inner.sum(-1))
