"""KeyDiff's measurements of keys and queries against the formulas written out; the report on a model."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import kit
import kvops
from kvops import analysis
from test_analysis import SPANS, counted, keys, spans

pytestmark = kit.every_device


@pytest.mark.parametrize("given", SPANS, ids=str)
@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
def test_query_key_cosine_is_the_mean_over_all_pairs(dtype, given):
    given = spans(given)
    k, q = keys(dtype=dtype), kit.randn(2, 6, 9, 16, seed=5).to(dtype)
    got = analysis.query_key_cosine(k, q, **given)
    assert got.shape == (2, 6)
    for (row, head), _, unit, _ in counted(k, given):
        for g in (2 * head, 2 * head + 1):
            expected = (F.normalize(q[row, g].double(), dim=-1) @ unit.mT).mean()
            torch.testing.assert_close(got[row, g], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("given", SPANS, ids=str)
@pytest.mark.parametrize("distance", (1, 20, 59, 1000))
def test_locality_is_the_mean_over_pairs(distance, given):
    given = spans(given)
    k = keys()
    got = analysis.key_locality(k, distance, **given)
    for at, slots, unit, _ in counted(k, given):
        gaps, cosines = slots - slots[:, None], unit @ unit.mT  # of j behind i
        for x, chosen in ((got.adjacent, gaps == 1), (got.distant, gaps >= distance)):
            torch.testing.assert_close(x[at], cosines[chosen].mean(), atol=1e-9, rtol=1e-6, equal_nan=True)
        torch.testing.assert_close(got.ratio[at], (1 - got.distant[at]) / (1 - got.adjacent[at]), equal_nan=True)
    assert got.distant.isnan().all() == (distance == 1000)


def test_volume_is_the_determinant_of_the_smaller_gram_matrix():
    k = kit.randn(2, 3, 40, 16)
    torch.testing.assert_close(analysis.log_volume(k), torch.logdet(k.double().mT @ k.double()))
    few = k[:, :, :10]
    torch.testing.assert_close(analysis.log_volume(few), torch.logdet(few.double() @ few.double().mT))
    indices = torch.arange(0, 40, 3).expand(2, 3, -1).clone()
    chosen = k[:, :, ::3].double()
    torch.testing.assert_close(analysis.log_volume(k, indices), torch.logdet(chosen @ chosen.mT))
    indices[1, :, 9:] = -1  # a row that keeps fewer
    shorter = chosen[1, :, :9]
    torch.testing.assert_close(analysis.log_volume(k, indices)[1], torch.logdet(shorter @ shorter.mT))
    assert (analysis.log_volume(k[..., :1, :].expand(-1, -1, 5, -1)) < -50).all()  # collinear


def test_keydiff_keeps_a_larger_volume_than_the_newest_tokens():
    """Fig. 12, on keys that share a direction but for a few."""
    k = kit.randn(1, 2, 512, 32) * 0.3 + kit.randn(1, 2, 1, 32, seed=1)
    k[:, :, ::16] = kit.randn(1, 2, 32, 32, seed=2)
    found = [
        analysis.log_volume(k, policy.compress(k, k).indices)
        for policy in (kvops.KeyDiff(64), kvops.StreamingLLM(64), kvops.Random(64))
    ]
    assert (found[0] > found[1] + 1).all() and (found[0] > found[2] + 1).all()


def weights(k, q, scale):
    """Attention of all pairs, [b, Hq, rows, n], and the keys of each query head."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (scale * q.double() @ k.mT).softmax(-1), k


@pytest.mark.parametrize("scale", (None, 1.0, 0.05))
def test_both_sides_of_the_lemma(scale):
    k, q = kit.randn(2, 3, 30, 16), kit.randn(2, 6, 5, 16, seed=1)
    got, limit = analysis.attention_bound(k, q, scale=scale), analysis.attention_bound(k, q, scale=scale, limit=True)
    scale = 0.25 if scale is None else scale
    w, k = weights(k, q, scale)
    for i in range(5):  # the lemma's query is of length 1, the rest is in the keys
        length = q[:, :, i].double().norm(dim=-1, keepdim=True)
        scaled = scale * length.unsqueeze(-1) * k
        most = scaled.norm(dim=-1).square().amax(-1, keepdim=True)
        lower = (math.log(29 / 30) - (1 - w[:, :, i]).log()) / (2 * most) - 1
        torch.testing.assert_close(got.bound[:, :, i], lower, atol=1e-9, rtol=1e-6)
        torch.testing.assert_close(limit.bound[:, :, i], lower - math.log(29 / 30) / (2 * most), atol=1e-9, rtol=1e-6)
        cosine = F.cosine_similarity(q[:, :, i, None].double(), k, dim=-1)
        torch.testing.assert_close(got.cosine[:, :, i], cosine)
    torch.testing.assert_close(got.weight, w)
    assert (got.bound <= got.cosine)[got.cosine >= 0].all()


def test_the_lemma_needs_a_positive_cosine():
    """All of the attention on a short key that points away from the query, because the others do so even more."""
    k = torch.tensor([[-8e-4, 6e-4], [-1.0, 0.0]])[None, None]
    got = analysis.attention_bound(k, torch.tensor([[[[1.0, 0.0]]]]), scale=1.0)
    assert got.weight[0, 0, 0, 0] > 0.7 and got.bound[0, 0, 0, 0] > got.cosine[0, 0, 0, 0] + 0.1


def test_a_weight_close_to_one_keeps_its_bound():
    """1 - w = exp(-60) is below the resolution of w."""
    k = torch.tensor([[30.0, 0.0], [-30.0, 0.0]])[None, None]
    got = analysis.attention_bound(k, torch.tensor([[[[1.0, 0.0]]]]), scale=1.0)
    torch.testing.assert_close(got.bound[0, 0, 0, 0].item(), (math.log(0.5) + 60) / 1800 - 1, atol=1e-12, rtol=0)


def test_both_sides_of_the_theorem():
    k, q = kit.randn(2, 3, 30, 16) + kit.randn(2, 3, 1, 16, seed=2), kit.randn(2, 6, 5, 16, seed=1)
    got = analysis.anchor_bound(k, q)
    k = k.double().repeat_interleave(2, 1)
    mean = k.mean(2, keepdim=True)
    alpha = F.cosine_similarity(mean, q.double(), dim=-1).unsqueeze(-1)
    beta = F.cosine_similarity(q.double().unsqueeze(3), k.unsqueeze(2), dim=-1)
    torch.testing.assert_close(got.similarity[:, :, 0], F.cosine_similarity(mean, k, dim=-1))
    torch.testing.assert_close(got.mean_query, alpha)
    torch.testing.assert_close(got.key_query, beta)
    torch.testing.assert_close(got.bound, 1 + alpha * beta - alpha**2 / 2 - beta**2 / 2)
    assert torch.equal(got.premise, (alpha < 0) & (beta > 0)) and got.premise.any() and not got.premise.all()
    assert (got.similarity <= got.bound + 1e-12).all()


def causal(k, q, visible):
    """Softmax over the visible keys, fp64 [b, Hq, rows, n], 0 elsewhere."""
    logits = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT / k.shape[-1] ** 0.5
    return logits.masked_fill(torch.arange(k.shape[2]) >= visible[:, None], -torch.inf).softmax(-1)


def test_attention_of_the_prompts_own_queries():
    k, q = kit.randn(2, 3, 40, 16), kit.randn(2, 6, 7, 16, seed=1)
    visible = kit.causal(7, 40)
    expected = causal(k, q, visible)
    got = analysis.cumulative_attention(k, q, visible=visible, group_reduce="none")
    torch.testing.assert_close(got.double(), expected.mean(2), atol=1e-6, rtol=0)
    sinks = analysis.sink_attention(k, q, 3, visible=visible)
    torch.testing.assert_close(sinks.double(), expected[..., :3].sum(-1).mean(2), atol=1e-6, rtol=0)
    starts, lengths = kit.int32(5, 0), kit.int32(35, 30)
    sinks = analysis.sink_attention(k, q, 3, starts=starts, lengths=lengths)
    for row, first, last in ((0, 5, 40), (1, 0, 30)):
        alone = analysis.sink_attention(k[row : row + 1, :, first:last], q[row : row + 1], 3)
        torch.testing.assert_close(sinks[row : row + 1], alone, atol=1e-6, rtol=0)


def rho(x, y):
    """Spearman's rho: the correlation of ranks, each the mean over all orders of tied values."""
    ranks = [(z[:, None] > z).sum(-1) + ((z[:, None] == z).sum(-1) + 1) / 2 for z in (x, y)]
    return torch.corrcoef(torch.stack(ranks).double())[0, 1]


@pytest.mark.parametrize("given", SPANS, ids=str)
def test_rank_correlation_is_spearmans(given):
    given = spans(given)
    k, q = keys(), kit.randn(2, 6, 9, 16, seed=5)
    k[:, :, 50:55] = k[:, :, 50:51]  # ties
    got = analysis.attention_rank_correlation(k, q, **given)
    attention = analysis.cumulative_attention(k, q, **given)
    for at, slots, unit, _ in counted(k, given):
        different = -F.cosine_similarity(unit.mean(0), unit, dim=-1).float()
        different[(slots >= 50) & (slots < 55)] = different[slots == 50]
        attended = attention[at][slots]
        attended[(slots >= 50) & (slots < 55)] = attended[slots == 50]
        torch.testing.assert_close(got[at].double(), rho(different, attended), atol=1e-4, rtol=0)


def test_rank_correlation_of_keys_that_all_queries_see():
    k, q = kit.randn(1, 2, 40, 16), kit.randn(1, 2, 7, 16, seed=1)
    visible = kit.causal(7, 40)
    got = analysis.attention_rank_correlation(k, q, visible=visible)
    seen = causal(k, q, visible).mean(2)[:, :, :34]
    unit = F.normalize(k, dim=-1)
    different = -F.cosine_similarity(unit.mean(2, keepdim=True), unit, dim=-1)[:, :, :34]
    for head in range(2):
        torch.testing.assert_close(got[0, head].double(), rho(different[0, head], seen[0, head]), atol=1e-4, rtol=0)


def test_correlation_is_1_where_queries_oppose_the_mean():
    """KeyDiff's regime: a single direction decides both."""
    k = torch.zeros(1, 1, 100, 8)
    angle = torch.linspace(0, 1, 100).square()  # no two keys equally far from their mean
    k[..., 0], k[..., 1] = angle.cos(), angle.sin()
    mean = F.normalize(k, dim=-1).mean(2, keepdim=True)
    torch.testing.assert_close(analysis.attention_rank_correlation(k, -mean), torch.tensor([[1.0]]))
    torch.testing.assert_close(analysis.attention_rank_correlation(k, mean), torch.tensor([[-1.0]]))


def test_bad_input():
    k, q = keys(), kit.randn(2, 6, 9, 16)
    with kit.refuses("sink_attention: sinks must be at least 1, got 0"):
        analysis.sink_attention(k, q, 0)
    with kit.refuses("key_locality: distance must be at least 1, got 0"):
        analysis.key_locality(k, 0)
    with kit.refuses("log_volume: k must be"):
        analysis.log_volume(k[0])
    with kit.refuses("query_key_cosine: q must be"):
        analysis.query_key_cosine(k, q[0])
    with kit.refuses("attention_bound: q must have at least one row"):
        analysis.attention_bound(k, q[:, :, :0])


# ---- python -m kvops.analysis ----


@pytest.fixture
def command():
    pytest.importorskip("transformers")
    from kvops.analysis import __main__

    return __main__


@kit.only("cpu")
def test_report_of_the_shipped_model(command, tmp_path, capsys):
    sizes = ["--tokens", "256", "--prompts", "2"]
    assert command.main([*sizes, "--json", str(tmp_path / "x.json")]) == 0
    record, shown = json.loads((tmp_path / "x.json").read_text()), capsys.readouterr().out
    assert [x["layer"] for x in record["layers"]] == [0, 1, 2]
    names = {"sink_mass": 4, "query_key_cosine": 4, "rank_correlation": 2, "adjacent_cosine": 2, "distant_cosine": 2}
    for layer in record["layers"]:
        for name, heads in names.items():
            assert len(layer[name]) == heads and all(-1 <= x <= 1 for x in layer[name])
            mean = sum(layer[name]) / heads
            assert f"{mean:.2f} [{min(layer[name]):.2f}, {max(layer[name]):.2f}]" in shown
        assert all(a <= b for a, b in zip(layer["top_cosine_bound"], layer["top_cosine"]))
        assert all(a <= b for a, b in zip(layer["top_anchor_cosine"], layer["top_anchor_bound"]))
    later = [x for layer in record["layers"][1:] for x in layer["query_key_cosine"]]
    assert record["gate"]["opposed"]["value"] == pytest.approx(sum(later) / len(later))
    assert record["command"].startswith("python -m kvops.analysis --tokens 256")
    assert command.main([*sizes, "--gate"]) == 1  # this model is not as the papers describe


@kit.only("cpu")
def test_measures_of_a_layer_are_those_of_its_attention(command):
    """With the model's own attention weights, from transformers."""
    import numpy as np
    import transformers

    from kvops import hf
    from kvops.analysis import report
    from kvops.demo import MODEL, TEXT

    ids = np.frombuffer(TEXT.read_bytes()[:256], dtype=np.uint8).astype(np.int64)[None]
    eager = transformers.AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager").eval()
    with torch.inference_mode():
        attended = eager(torch.from_numpy(ids), output_attentions=True).attentions
    model = hf.use_attention(transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval())
    for layer, weight in zip(report.measure(model, ids, sinks=4), attended, strict=True):
        expected = weight[0, :, -64:, :4].sum(-1).mean(-1)
        torch.testing.assert_close(torch.tensor(layer["sink_mass"]).double(), expected.double(), atol=1e-3, rtol=0)


@kit.only("cpu")
def test_the_gate(command):
    from kvops.analysis import report

    good = dict(
        sink_mass=[0.9, 0.2, 0.5], query_key_cosine=[-0.2, 0.1], rank_correlation=[0.9, 0.6], locality_ratio=[1.5, 4]
    )
    first = dict(sink_mass=[0.0], query_key_cosine=[1.0], rank_correlation=[-1.0], locality_ratio=[1.0])
    layers = [{"layer": 0, **first}, {"layer": 1, **good}]
    assert all(x["holds"] for x in report.gate(layers).values())
    for name, worse in first.items():
        assert not all(x["holds"] for x in report.gate([layers[0], {**layers[1], name: worse}]).values())
    assert not any(x["holds"] for x in report.gate(layers[:1]).values())


@kit.only("cpu")
def test_arguments_are_checked(command, tmp_path, capsys):
    for arguments, message in (
        (["--tokens", "255"], "--tokens: expected at least 256, got 255"),
        (["--prompts", "0"], "--prompts: expected at least 1, got 0"),
        (["--sinks", "600"], "--sinks: expected at most 512 (half of --tokens), got 600"),
        (["--text", str(tmp_path)], "--text: expected a file"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert message in capsys.readouterr().err
    assert command.main(["--model", str(tmp_path / "none")]) == 2
    assert f"python -m kvops.analysis: --model {tmp_path}/none: " in capsys.readouterr().err
    assert command.main(["--tokens", "1000000"]) == 2
    assert "--tokens: expected at most" in capsys.readouterr().err
