"""Small runs of bench/experiments/end_to_end.py: what it measures, compares, leaves out and prints."""

# ruff: noqa: E402  (after the check of what it needs)

import gc
import json

import pytest
import torch

for name in ("transformers", "matplotlib", "tqdm"):
    pytest.importorskip(name)

import end_to_end
from end_to_end import DYNAMIC, FULL, SINKS
from kvops.ops.lag import kept_length

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]
SMALL = ["--device", "cpu", "--heads", "4", "--dtype", "float32", "--lag", "64", "--new-tokens", "2", "--ratios"]
SMALL += ["2", "6", "--blocks", "64", "--block-context", "256", "--budget", "64"]
BLOCKS = [FULL, "StreamingLLM", "KeyDiff", "TOVA", "SnapKV"]
DECODE = [DYNAMIC, *BLOCKS, "StreamingLLM, original positions", "H2O", "LagKV", "ProtoKV"]


@pytest.fixture(scope="module", autouse=True)
def little_to_collect():
    """Each sample starts with a garbage collection, which would visit everything that earlier tests left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("end_to_end")
    sizes = ["--layers", "2", "--contexts", "256", "512", "--repeats", "2"]
    end_to_end.main([*SMALL, *sizes, "--json", str(out / "x.json"), "--out", str(out)])
    assert (out / "end_to_end.png").stat().st_size > 10_000
    end_to_end.main(["--from", str(out / "x.json"), "--out", str(out / "again")])
    assert (out / "again" / "end_to_end.png").read_bytes() == (out / "end_to_end.png").read_bytes()
    return json.loads((out / "x.json").read_text())


def test_every_cell_is_there(record):
    found = {(r["prefill"], r["context"]): [] for r in record["rows"]}
    for r in record["rows"]:
        found[r["prefill"], r["context"]].append(r["method"])
        assert r["samples"] == record["repeats"] == 2 and r["ttft_s"] > 0
        assert ("tpot_s" in r) == (r["prefill"] != "blocks of 64")
    chunked, whole = [FULL, "LagKV 2x", "LagKV 6x"], [FULL, "LagKV 6x"]
    assert found == {
        ("blocks of 64", 256): BLOCKS,
        ("decode", 256): DECODE,
        **{("chunked", n): chunked for n in (256, 512)},
        **{("whole", n): whole for n in (256, 512)},
    }
    assert record["left_out"] == []
    assert "2 of 32 layers" in record["shape"] and "4 of 32 heads" in record["shape"]


def test_bytes_are_those_of_the_kept_tokens(record):
    """LagKV's match Eq. 10 for any prefill; a token takes K and V of one KV head in two layers."""
    per_token = 2 * 2 * 128 * 4
    for r in record["rows"]:
        n, name = r["context"], r["method"]
        if name in (FULL, DYNAMIC):
            expected = n
        elif name == "LagKV":
            expected = kept_length(n, SINKS, 8, 2)
        elif name.startswith("LagKV"):
            lag, ratio = record["lag"], int(name[-2])
            partitions, rest = divmod(n - SINKS, lag)
            expected = SINKS + (partitions - 1) * int(lag / ratio) + lag + rest
            assert r["kept_eq_10"] == expected
        else:
            expected = record["budget"]
        room = max(32, expected // 4)  # at most
        assert (r["kept"], r["bytes_full"]) == (expected, n * per_token), r
        assert expected * per_token <= r["bytes_kept"] <= (expected + room) * per_token, r
        if r["peak_bytes"] is not None:
            assert 0 <= r["peak_bytes"] < 1 << 30


def test_times_are_compared_with_the_full_cache_of_the_same_prompt(record):
    """Decode times are compared with transformers' own cache."""
    base = {(r["prefill"], r["context"]): r for r in record["rows"] if r["method"] == FULL}
    base["decode", 256] = next(r for r in record["rows"] if r["method"] == DYNAMIC)
    for r in record["rows"]:
        full = base[r["prefill"], r["context"]]
        for x, (median, least, most) in r["speedup"].items():
            ratios = [b / a for a, b in zip(r["each"][f"{x}_s"], full["each"][f"{x}_s"])]
            assert len(ratios) == 2 and (least, most) == pytest.approx((min(ratios), max(ratios)))
            assert median == pytest.approx(sum(ratios) / 2)
            assert median == 1 or r is not full


def test_a_prompt_shorter_than_two_partitions_stays():
    assert [end_to_end.kept(n, 64, 2) for n in (100, SINKS + 127, SINKS + 128)] == [100, SINKS + 127, SINKS + 96]


def test_every_token_of_a_prompt_comes_once():
    todo = end_to_end.cells([200, 1000], [2], [2], 64, 2, [64, 96], 300, 64)
    for cell in todo:
        tokens = torch.arange(cell.context)
        parts = [tokens[x] for x in end_to_end.pieces(cell)]
        assert torch.equal(torch.cat(parts), tokens) and max(map(len, parts)) == min(cell.first, cell.context)
        if cell.prefill == "chunked":  # S + 2 L, then L at a time
            assert [len(x) for x in parts[:2]] == [144, min(64, cell.context - 144)]


@pytest.mark.parametrize("gigabytes, layers", [(140, 32), (16, 16), (8, 6), (1, 1)])
def test_as_many_layers_as_fit(gigabytes, layers, monkeypatch):
    """Each takes 436 MB, 66 MB of vocabulary and 2 x 84 MB of cache; 3.1 GB and a tenth of the memory stay free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gigabytes * 10**9, 0))
    assert end_to_end.layers_that_fit(32, 20480, torch.bfloat16) == layers


def test_without_ratios_no_prompt_comes_whole():
    assert {x.prefill for x in end_to_end.cells([200], [2, 4], [], 64, 2, [], 300, 64)} == {"chunked"}


def test_what_there_was_no_time_for_is_named(tmp_path, capsys):
    sizes = ["--layers", "1", "--contexts", "200", "--seconds", "1e-9"]
    end_to_end.main([*SMALL, *sizes, "--json", str(tmp_path / "x.json"), "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert shown.count("not measured for lack of time: ") == len(BLOCKS) + len(DECODE) + 3 + 2
    assert "not measured for lack of time: LagKV 6x, 200 tokens, whole" in shown
    left = json.loads((tmp_path / "x.json").read_text())
    assert left["rows"] == [] and len(left["left_out"]) == 20 and not (tmp_path / "end_to_end.png").exists()


def test_a_cell_without_memory_does_not_stop_the_others(monkeypatch, capsys):
    whole = end_to_end.sample

    def sample(model, cell, ids):
        if cell.name == "TOVA" and cell.prefill:
            raise torch.OutOfMemoryError("CUDA out of memory.\nand so on")
        return whole(model, cell, ids)

    monkeypatch.setattr(end_to_end, "sample", sample)
    end_to_end.main([*SMALL, "--layers", "1", "--contexts"])
    shown = capsys.readouterr().out.splitlines()
    assert [x.split()[-1] for x in shown if "TOVA" in x] == ["memory."] * 2
    assert len([x for x in shown if x.startswith("blocks of 64")]) == len(BLOCKS)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--heads", "6"], "--heads must be a multiple of 4, got 6"),
        (["--ratios", "1"], "--ratios must be at least 2, got 1"),
        (["--whole", "3"], "--whole must be among --ratios [2, 6], got 3"),
        (["--contexts", "4096", "0"], "--contexts must be at least 1, got 0"),
        (["--new-tokens", "0"], "--new-tokens must be at least 1, got 0"),
        (["--blocks", "16"], "--blocks must be at least 32, got 16"),
        (["--budget", "256"], "--budget must be more than 32 and less than --block-context 256, got 256"),
        (["--contexts", "--blocks"], "nothing to measure"),
    ],
)
def test_wrong_arguments(options, message, capsys):
    with pytest.raises(SystemExit):
        end_to_end.main([*SMALL, *options])
    assert message in capsys.readouterr().err
