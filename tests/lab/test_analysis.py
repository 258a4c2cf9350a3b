"""The looks at semantic anchors against all pairs of keys written out; the script that applies them to a model."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import kit
from kvops import analysis
from kvops.ops import outlier_degree, reference

pytestmark = kit.every_device

ROOT = Path(__file__).parents[2]
SPANS = [{}, dict(starts=(7, 0)), dict(lengths=(60, 73)), dict(starts=(7, 20), lengths=(60, 53))]
THRESHOLDS = (-10.0, 0.0, 1.0, 1.5, 50.0)


def spans(given: dict) -> dict:
    return {name: kit.int32(*x) for name, x in given.items()}


def keys(n: int = 73, d: int = 16, dtype=torch.float32):
    """[2, 3, n, d] with a common direction; in one head a zero key, in another one that is not finite."""
    k = kit.randn(2, 3, n, d, seed=1) + 2 * kit.randn(2, 3, 1, d, seed=2)
    k[0, 1, 30], k[1, 2, 40, 3] = 0, torch.nan
    return k.to(dtype)


def counted(k, given: dict):
    """The rows of each head that count: ((row, head), slots, unit keys in fp64, Theta in fp64)."""
    theta = reference.outlier_degree(k, **given)
    for row in range(k.shape[0]):
        for head in range(k.shape[1]):
            slots = theta[row, head].isfinite().nonzero()[:, 0]
            x = k[row, head, slots].double()
            yield (row, head), slots, x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300), theta[row, head, slots]


@pytest.mark.parametrize("given", SPANS, ids=str)
@pytest.mark.parametrize("dtype", kit.DTYPES, ids=str)
def test_similarity_is_the_mean_cosine_of_all_neighbours(dtype, given):
    given = spans(given)
    k = keys(dtype=dtype)
    got = analysis.neighbourhood_similarity(k, 5, **given)
    for at, slots, unit, _ in counted(k, given):
        near = (slots[:, None] - slots).abs() <= 5
        expected = torch.where(near, unit @ unit.mT, 0).sum(-1) / near.sum(-1)
        torch.testing.assert_close(got[at][slots].double(), expected, atol=1e-6, rtol=0)
        assert got[at].isfinite().sum() == len(slots)


@pytest.mark.parametrize("given", SPANS, ids=str)
def test_counts_are_those_of_the_outlier_degrees(given):
    given = spans(given)
    k = keys()
    edges = torch.linspace(-2.013, 2.987, 11)  # no degree lies as close to an edge as rounding moves it
    histogram, anchors = analysis.outlier_histogram(k, edges, **given), analysis.sat_counts(k, THRESHOLDS, **given)
    for at, slots, _, theta in counted(k, given):
        assert (theta[:, None] - edges).abs().min() > 1e-4
        limits = [-torch.inf, *edges.tolist(), torch.inf]
        expected = [int(((low <= theta) & (theta < high)).sum()) for low, high in zip(limits, limits[1:])]
        assert histogram[at].tolist() == expected and sum(expected) == len(slots)
        assert anchors[at].tolist() == [int((theta > x).sum()) for x in THRESHOLDS]


@pytest.mark.parametrize("distinct", (False, True))
@pytest.mark.parametrize("given", SPANS, ids=str)
def test_clustering_degree_is_the_ratio_over_all_pairs(given, distinct):
    given = spans(given)
    k = keys()
    got = analysis.clustering_degree(k, THRESHOLDS, distinct=distinct, **given)
    for at, _, unit, theta in counted(k, given):
        for i, threshold in enumerate(THRESHOLDS):
            inside = theta > threshold
            pairs = inside[:, None] & inside & ~(torch.eye(len(theta), dtype=torch.bool) & distinct)
            cosines = unit @ unit.mT
            intra, inter = cosines[pairs].mean(), cosines[inside][:, ~inside].mean()  # NaN where there is no pair
            for x, expected in ((got.intra, intra), (got.inter, inter), (got.degree, intra / inter)):
                torch.testing.assert_close(x[(*at, i)], expected, atol=1e-9, rtol=1e-6, equal_nan=True)
            assert got.tokens[(*at, i)] == inside.sum()
    assert got.degree[..., 1:4].isfinite().any() and got.intra[..., 4].isnan().all() and got.inter[..., 0].isnan().all()


def test_planted_anchors_lie_together():
    """Above a threshold that only anchors reach the degree jumps; what is an outlier by chance lies anywhere."""
    n, d, count = 600, 32, 12
    k = 0.3 * kit.randn(1, 2, n, d, seed=1) + 2 * kit.randn(1, 2, 1, d, seed=2)
    chance = analysis.clustering_degree(k, (0.0, 1.0, 2.0), distinct=True).degree
    assert ((chance - 1).abs() < 0.1).all()
    slots = torch.arange(count) * 45 + 20
    k[:, :, slots] = 0.3 * kit.randn(1, 2, count, d, seed=3) + 2 * kit.randn(1, 2, 1, d, seed=4)
    found = analysis.clustering_degree(k, (0.0, 2.0))
    assert (found.tokens[..., 0] == 11 * count).all()  # their neighbours look less like theirs, too
    assert (found.degree[..., 0] < 1).all() and (found.degree[..., 1] > 4).all()
    assert (analysis.sat_counts(k) == count).all()
    assert (outlier_degree(k)[:, :, slots] > 2).all()


@pytest.mark.parametrize("given", SPANS, ids=str)
def test_attention_by_group_is_the_softmax_by_rank(given):
    given = spans(given)
    k, q = keys(), kit.randn(2, 6, 9, 16, seed=5)
    groups, skip = 4, 10
    got = analysis.attention_by_outlier_group(k, q, groups=groups, **given)
    behind = analysis.attention_by_outlier_group(k, q, groups=groups, skip=skip, **given)
    assert got.shape == behind.shape == (2, 3, groups)
    for (row, head), slots, _, theta in counted(k, given):
        logits = q[row, 2 * head : 2 * head + 2].double() @ k[row, head, slots].double().mT / 4
        attention = logits.softmax(-1).mean((0, 1))
        first = int(given["starts"][row]) if "starts" in given else 0
        for x, left_out in ((got, 0), (behind, skip)):
            kept = slots >= first + left_out
            order = theta[kept].sort(descending=True, stable=True).indices
            ranked = attention[kept][order]
            expected = torch.zeros(groups, dtype=torch.float64)
            expected.index_add_(0, torch.arange(len(ranked)) * groups // len(ranked), ranked)
            torch.testing.assert_close(x[row, head].double(), expected, atol=1e-6, rtol=0)
            total = attention.sum() if not left_out else attention[kept].sum()
            torch.testing.assert_close(x[row, head].double().sum(), total, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 3), atol=1e-6, rtol=0)


def test_the_attention_is_the_models():
    """Scale, softcap and sinks as in the window operator; more queries than it takes at once."""
    k, q = keys(), kit.randn(2, 6, 300, 16, seed=5)
    sinks = kit.randn(6, seed=6)
    attention = analysis.cumulative_attention(k, q, scale=0.5, softcap=3.0, sink_logits=sinks)
    logits = 3 * (0.5 * q.double().unflatten(1, (3, 2)) @ k.double().unsqueeze(2).mT / 3).tanh()
    logits = torch.cat((logits, sinks.double().view(3, 2, 1, 1).expand(2, 3, 2, 300, 1)), -1)
    expected = logits.masked_fill(logits.isnan(), -torch.inf).softmax(-1)[..., :-1].mean((2, 3))
    seen = attention.isfinite()
    assert seen.sum() == seen.numel() - 1  # the key that is not finite
    torch.testing.assert_close(attention[seen].double(), expected[seen], atol=1e-6, rtol=0)


def test_keys_without_outliers():
    """All alike, none at all, or a single one: no anchors, and numbers that say so."""
    q = kit.randn(1, 1, 2, 8)
    for n in (1, 40):
        k = kit.randn(1, 1, 1, 8).expand(-1, -1, n, -1)
        assert (analysis.sat_counts(k) == 0).all()
        assert analysis.outlier_histogram(k, (-0.5, 0.5)).tolist() == [[[0, n, 0]]]
        assert analysis.clustering_degree(k, (1.0,)).degree.isnan().all()
        shares = analysis.attention_by_outlier_group(k, q)
        torch.testing.assert_close(shares.sum(), torch.tensor(1.0))
        assert (shares[0, 0, 1:] == 0).all() if n == 1 else (shares - 0.1).abs().max() < 1e-6
    k = torch.full((1, 1, 5, 8), torch.nan)
    assert (analysis.outlier_histogram(k, (0.0,)) == 0).all() and (analysis.sat_counts(k) == 0).all()
    assert analysis.clustering_degree(k, (0.0,)).degree.isnan().all()
    assert (analysis.attention_by_outlier_group(k, q) == 0).all()
    assert (analysis.attention_by_outlier_group(kit.randn(1, 1, 5, 8), q, skip=5) == 0).all()


def test_bad_input():
    k, q = keys(), kit.randn(2, 6, 9, 16)
    for given, message in (
        (dict(groups=0), "attention_by_outlier_group: groups must be at least 1, got 0"),
        (dict(skip=-1), "attention_by_outlier_group: skip must be at least 0, got -1"),
        (dict(kappa=0), "kappa"),
    ):
        with kit.refuses(message):
            analysis.attention_by_outlier_group(k, q, **given)
    with kit.refuses("cumulative_attention: q must have at least one row"):
        analysis.cumulative_attention(k, q[:, :, :0])
    with kit.refuses("groups must be an int, got bool", kind=TypeError):
        analysis.attention_by_outlier_group(k, q, groups=True)


# ---- bench/experiments/anchors.py ----


@pytest.fixture
def anchors(monkeypatch):
    for name in ("transformers", "matplotlib", "tqdm"):
        pytest.importorskip(name)
    import anchors

    monkeypatch.setattr(anchors, "DROPS", (0, 64))
    return anchors


PICTURES = [f"anchors-{name}.png" for name in ("attention", "clusters", "dropped", "outliers", "similarity")]


@kit.only("cpu")
def test_anchors_of_the_demo(anchors, tmp_path, capsys):
    """The answer is the key; losing outliers costs digits that losing as many random tokens does not."""
    record = tmp_path / "x.json"
    sizes = ["--prompts", "2", "--context", "700", "--tokens", "16"]
    anchors.main([*sizes, "--json", str(record), "--out", str(tmp_path)])
    assert sorted(x.name for x in tmp_path.glob("*.png")) == PICTURES
    found, shown = json.loads(record.read_text()), capsys.readouterr().out
    whole, lost = zip(*found["answer left"].values())
    assert whole == (1, 1, 1, 1) and lost[0] < lost[3] and lost[2] < 0.5
    assert all(f"{100 * x:8.1f}" in shown for x in lost)
    for name in ("similarity", "outlier degree of the key"):
        assert torch.tensor(found[name]).shape == (3, 2)
    attention = torch.tensor(found["attention, skip 0"])
    torch.testing.assert_close(attention.sum(-1), torch.ones(3, 2), atol=1e-3, rtol=0)
    assert attention[2, 1, 0] > 0.3  # of the head that looks digits up: they are outliers there
    assert found["tokens of a prompt"] == 700 + len(anchors.passkeys.QUESTION)


@kit.only("cpu")
def test_anchors_of_any_local_model(anchors, tmp_path, capsys, monkeypatch):
    """One whose layers do not all evict, with a softcap: what is not cut says the same, what is cut does not."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=260,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        sliding_window=40,
        attn_logit_softcapping=20.0,
        initializer_range=0.3,
        tie_word_embeddings=False,  # else it only says its last token again
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "bench/models/passkey-llama" / name, tmp_path / "model")
    sizes = ["--prompts", "2", "--context", "150", "--tokens", "12"]
    anchors.main(
        ["--model", str(tmp_path / "model"), *sizes, "--json", str(tmp_path / "x.json"), "--out", str(tmp_path)]
    )
    found = json.loads((tmp_path / "x.json").read_text())
    assert torch.tensor(found["similarity"]).shape == (2, 3) and "outlier degree of the key" not in found
    assert all(whole == 1 and lost < 1 for whole, lost in found["answer left"].values())
    assert (tmp_path / "anchors-clusters.png").exists()
    with pytest.raises(SystemExit):
        anchors.main(["--model", str(tmp_path / "model"), "--context", "1000000"])
    assert "too few for --context" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        anchors.main(["--context", "75"])
    assert "--context must be at least 76, got 75" in capsys.readouterr().err
