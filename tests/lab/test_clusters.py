"""bench/experiments/clusters.py and fp8_rows.py, and the K-means of variants.py against its iteration written out."""

# ruff: noqa: E402  (after the check of what they need)

import json

import pytest
import torch
from torch.nn.functional import normalize

for name in ("transformers", "matplotlib", "tqdm"):
    pytest.importorskip(name)

import clusters
import fp8_rows
import kit
import kvops
from kvops.ops import assign_prototypes
from variants import KMeansKV


def test_k_means():
    """Each iteration assigns the keys to the mean directions of the clusters before, at first to evenly spaced keys."""
    k, _ = kit.kv(2, 2, 90, 16)
    spans = dict(starts=kit.int32(0, 6), lengths=kit.int32(80, 70))
    keys, centers = normalize(k.double(), dim=-1), torch.zeros(2, 2, 12, 16, dtype=torch.double)
    for row, (first, length) in enumerate(((0, 80), (6, 70))):
        centers[row] = keys[row][:, [first + i * length // 12 for i in range(12)]]
    for iterations in (1, 2, 3, 4):
        policy = KMeansKV(40, 8, num_chunks=8, iterations=iterations)
        found = policy.assign(kvops.View(k, k), *spans.values())
        assert torch.equal(found, assign_prototypes(k, centers.float(), **spans))
        assert ((found >= 0).sum(-1) == spans["lengths"][:, None]).all()
        for row in range(2):
            for head in range(2):
                for c in range(12):
                    own = keys[row, head][found[row, head] == c]
                    if len(own):
                        centers[row, head, c] = own.sum(0)


def test_k_means_as_a_method():
    """It keeps as many tokens as ProtoKV, and whole clusters."""
    q, (k, v) = kit.randn(1, 4, 120, 16), kit.kv(1, 2, 120, 16)
    cache = kvops.Cache(KMeansKV(50, 8, num_chunks=8))
    cache.attend(q, k, v)
    kept = cache.positions[0]
    assert kept.shape == (2, 50) and torch.equal(kept[:, -8:], torch.arange(112, 120).expand(2, -1))
    found = cache.policy.assign(kvops.View(k, v), None, kit.int32(112))[0]
    for head in range(2):
        inside = torch.zeros(120, dtype=torch.bool)
        inside[kept[head]] = True
        cut = [c for c in range(12) if 0 < inside[:112][found[head, :112] == c].float().mean() < 1]
        assert len(cut) <= 1  # only the cluster at the threshold


def test_clusters(tmp_path, capsys):
    """More iterations fit the keys better and cost more; on this model choosing at every step keeps more attention."""
    record = tmp_path / "x.json"
    sizes = ["--prompts", "2", "--context", "400", "--budget", "100", "--repeats", "2"]
    clusters.main([*sizes, "--json", str(record)])
    found, shown = json.loads(record.read_text()), capsys.readouterr().out
    assert set(found["mass"]) == set(clusters.CLUSTERINGS) and all(name in shown for name in found["mass"])
    mean = {x: {y: sum(z) / len(z) for y, z in v.items()} for x, v in found["mass"].items()}
    for x in mean.values():
        assert all(0 < y < 1 for y in x.values())
        assert x["every step, dot"] > x["once, dot"] and x["every step, softmax"] > x["once, softmax"]
    assert mean["K-means, 1"]["cosine"] < mean["K-means, 2"]["cosine"] < mean["K-means, 10"]["cosine"]
    assert found["seconds"]["K-means, 20"] > 3 * found["seconds"]["K-means, 2"] > 0
    with pytest.raises(SystemExit):
        clusters.main(["--budget", "32"])
    assert "--budget must be more than 32" in capsys.readouterr().err


def test_fp8_rows(tmp_path, capsys):
    """Rows in e4m3, which has a bit more of precision, keep more of the same tokens than rows in e5m2."""
    record = tmp_path / "x.json"
    fp8_rows.main(["--prompts", "2", "--context", "400", "--budget", "100", "--json", str(record)])
    found, shown = json.loads(record.read_text())["kept"], capsys.readouterr().out
    assert set(found) == set(fp8_rows.METHODS) and all(name in shown for name in found)
    same = {x: sum(sum(of[x]["same"]) for of in found.values()) / (2 * len(found)) for x in fp8_rows.FORMATS}
    assert 0.8 < same["e5m2"] < same["e4m3"] < 1
    assert all(abs(y) < 0.1 for of in found.values() for x in of.values() for y in x["lost"])
