"""The benchmark: its baselines compute the same as kvops, and its command writes its measurements."""

import copy
import functools
import json
import math
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvops import build_info
from kvops.bench import ROWS, gpu, pages, record
from kvops.bench import __main__ as command
from kvops.bench import measure as measuring
from kvops.bench.goals import goals
from kvops.bench.measure import Contender, measure
from kvops.bench.rows import SINK, Case
from kvops.ops import reference
from test_schema import SCHEMAS

N = 1024
RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.parametrize("name", ROWS)
def test_baseline_computes_the_same(name):
    row = ROWS[name]
    heads, n = row.shape or (2, N)
    for form, call in row.forms.items():
        case = Case(n, torch.float32, heads, d=64)
        theirs = row.eager(*row.args(case))  # first: the form may be in place
        ours = call(case)
        if name.startswith("snapkv"):  # pooled scores are equal among neighbours, and torch.topk takes any of them
            kept = [[set(x.tolist()) for x in result[2].flatten(0, 1)] for result in (ours, theirs)]
            assert all(len(a - b) < 7 for a, b in zip(*kept, strict=True)) and ours[0].shape == theirs[0].shape
            continue
        if name == "assign_prototypes":  # products of bf16 take almost the best
            cosines = reference.prototype_cosines(case.k, case.clusters.prototypes)
            chosen = (cosines.gather(-1, x.long().unsqueeze(-1)) for x in (ours, theirs))
            assert torch.subtract(*chosen).abs().max() < 4e-3
            continue
        if name == "protokv_compress":  # and a token in another cluster may change what is kept of both
            kept = [[set(x.tolist()) for x in result[2].flatten(0, 1)] for result in (ours, theirs)]
            assert (
                all(len(a & b) > 0.9 * len(a) for a, b in zip(*kept, strict=True)) and ours[0].shape == theirs[0].shape
            )
            continue
        # exact for indices, as they are < 1e4; int8 is attended by queries in bf16
        close = dict(rtol=2e-2, atol=5e-3) if name.endswith("int8") else dict(rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours, theirs, **close)
        case.restore()
        assert torch.equal(case.k, Case(n, torch.float32, heads, d=64).k), f"restore after {form!r}"


def test_a_quarter_is_kept():
    for n in (512, 4096, 65536):
        case = Case(n, torch.float32, heads=1, d=16)
        m = int(case.ratio * case.lag)
        kept = n - (case.partitions - 1) * (case.lag - m)
        assert m > 0 and case.budget - case.partitions < kept <= case.budget == n // 4
        assert SINK < kept and case.lagkv_out[0].shape[2] == kept


def test_everything_runs_in_turns():
    order = []
    rivals = {name: Contender(lambda name=name: order.append(name)) for name in "ab"}
    for rival in rivals.values():
        rival.calls = 2
    for _ in range(2):
        for rival in rivals.values():
            assert rival.sample() > 0
    assert order == ["a", "a", "b", "b"] * 2


def test_restore_precedes_every_in_place_call():
    """Compressing twice would move nothing the second time."""
    case = Case(N, torch.float32, heads=1, d=64)
    whole, row, seen = case.k.clone(), ROWS["keydiff_compress"], []

    def compress(c: Case) -> None:
        seen.append(torch.equal(c.k, whole))
        row.forms["in place"](c)

    measure("keydiff_compress", replace(row, forms={"in place": compress}), case, 2, compiled=False)
    assert len(seen) >= 3 and all(seen) and not torch.equal(case.k, whole)


@pytest.mark.full
def test_command(tmp_path):
    record, picture = tmp_path / "out" / "bench.json", tmp_path / "out" / "bench.png"
    command = ["--quick", "--n", "512", "--repeats", "2", "--heads", "2", "--json", str(record), "--plot", str(picture)]
    done = subprocess.run([sys.executable, "-m", "kvops.bench", *command], capture_output=True, text=True)
    assert done.returncode == int("failed: " in done.stdout), done.stderr  # a probe, where the machine is very busy
    assert "leaves torch.compile out" in done.stdout and str(picture) in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")

    found = json.loads(record.read_text())
    assert found["command"].startswith("python -m kvops.bench --quick --n 512") and found["machine"]["cores"] >= 1
    assert found["isa"] == build_info()["isa"] and found["torch"] == torch.__version__
    rows = {(r["operator"], r["form"], r["dtype"]): r for r in found["rows"]}
    measured = {name: row for name, row in ROWS.items() if not row.cuda_only}
    dtypes = {name: ("float32", "bfloat16") if row.per_dtype else ("float32",) for name, row in measured.items()}
    assert set(rows) == {(name, form, t) for name, row in measured.items() for form in row.forms for t in dtypes[name]}
    for (name, form, _), row in rows.items():
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"]["best"] / 1e9)
        assert row["ratio"]["eager"]["seconds"] == pytest.approx(row["ratio"]["eager"]["best"] * row["seconds"]["best"])
        assert "compile" not in row["ratio"]
        assert ("parts" in row["ratio"]) == bool(form == "fresh" and ROWS[name].parts)
        assert row["seconds"]["best"] <= row["seconds"]["median"]
        label = f"{name} {form}".strip()
        assert any(line.startswith(label) for line in done.stdout.splitlines()), f"{label} is not in the table"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--n", "100"], "--n: expected at least 512"),
        (["--ops", "sort"], "--ops: expected a row of the benchmark, got 'sort'"),
        (["--device", "tpu"], "--device tpu: expected cpu or cuda"),
        (["--device", "cuda"], "--device cuda: torch .* sees no NVIDIA GPU"),
        (["--n", str(2**31)], "--n: expected at most 2147483647"),
        (["--heads", "0"], "--heads: expected 1 to 4096, got 0"),
        (["--head-dim", "12"], "--head-dim: expected a multiple of 8 .16 bytes., got 12"),
        (["--repeats", "0"], "--repeats: expected 1 to 1000000, got 0"),
        (["--compile", "-1"], "--compile: expected 0 to 2147483647, got -1"),
        (["--seconds", "nan"], "--seconds: expected a positive number, got nan"),
        (["--resume"], "--resume: needs --json FILE"),
        (["--json", "."], "--json: expected a file, got the folder ."),
        (["--json", "x" * 300], "--json: x+ cannot be written: File name too long"),
        (["--markdown", "/proc/none/a"], "--markdown: /proc/none/a cannot be written: No such file"),
        (["--plot", "a.xyz"], "--plot: expected a name that ends in .*.png.*, got a.xyz"),
        (["--plot", ""], "--plot: expected a file, got nothing"),
        (["--from", "nowhere"], "--from: expected a file that --json wrote, got nowhere"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as done:
        command.main(arguments)
    said = capsys.readouterr().err.splitlines()
    assert done.value.code == 2 and re.search(f"^python -m kvops.bench: error: .*{message}", said[0])
    assert said[1:] == ["python -m kvops.bench --help lists the options"]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the command; return its status, output and record."""

    def run(*arguments: str) -> tuple[int, str, dict]:
        file = tmp_path / "bench.json"
        monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--json", str(file), *arguments])
        code = command.main()
        return code, "".join(capsys.readouterr()), json.loads(file.read_text())

    return run


SMALL = ["--n", "512", "--heads", "1", "--head-dim", "64", "--dtype", "fp32", "--repeats", "2", "--ops"]


def test_rows_are_printed_as_they_are_measured(monkeypatch, capsys):
    real, shown = command.measure, []

    def measure(*args):
        shown.append(capsys.readouterr().out)
        return real(*args)

    monkeypatch.setattr(command, "measure", measure)
    command.main(["--quick", *SMALL, "gather_kv", "lag_score"])
    assert shown[0].splitlines()[-1] == "[1 of 2] gather_kv 512 fp32: "
    times = r"[\d.]+ [mu]s, [\d.]+ GB/s, eager [\d.e+]+x"
    assert re.fullmatch(rf"out= {times}; fresh {times}\n\[2 of 2\] lag_score 512 fp32: ", shown[1])


def test_a_typo_in_a_row(capsys):
    with pytest.raises(SystemExit):
        command.main(["--ops", "lag_scor"])
    expected = "argument --ops: expected a row of the benchmark, got 'lag_scor'; did you mean 'lag_score'?"
    assert capsys.readouterr().err.splitlines()[0] == f"python -m kvops.bench: error: {expected}"


def test_help_has_the_rows_as_a_shell_takes_them(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = " ".join(capsys.readouterr().out.split()).partition("default: all), of: ")[2].partition(" --n ")[0]
    assert shlex.split(said) == list(ROWS)


def test_what_fails_leaves_the_others(run, monkeypatch):
    """A failed baseline and a failed row are reported with the reason in the table, below it and in the record."""

    def fail(*_):
        raise RuntimeError("no\tcompiler\nand so on")

    monkeypatch.setattr(measuring, "MOST_SHARE", math.inf)
    monkeypatch.setitem(ROWS, "gather_kv", replace(ROWS["gather_kv"], eager=fail))
    monkeypatch.setitem(ROWS, "lsh_bucket", replace(ROWS["lsh_bucket"], args=fail))
    code, shown, found = run(*SMALL, "gather_kv", "lsh_bucket")
    whole = {(r["operator"], "error" in r, *r.get("failed", {}).items()) for r in found["rows"]}
    assert code == 1 and whole == {("gather_kv", False, ("eager", "no compiler")), ("lsh_bucket", True)}
    assert re.search(r"^gather_kv fresh +512 +fp32 .* failed$", shown, re.M)
    assert re.search(r"^lsh_bucket +512 +fp32 +failed$", shown, re.M)
    assert "failed: gather_kv 512 float32: eager: no compiler\n" in shown
    assert "failed: lsh_bucket 512 float32: kvops : no compiler\n" in shown


def test_compile_without_a_compiler(monkeypatch):
    """The row says so and has its other ratios."""

    def called(*_):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in (None, 'g++')\n\nSet TORCHDYNAMO...")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: called)
    row, case = ROWS["cluster_mean"], Case(512, torch.float32, 1, 64)
    (result,) = measure("cluster_mean", replace(row, against=""), case, 1, compiled=True)
    assert result["failed"] == {"compile": "InvalidCxxCompiler: No working C++ compiler found in (None, 'g++')"}
    assert set(result["ratio"]) == {"eager"}


@pytest.mark.parametrize("held_up", [3, 10**6])
def test_a_probe_that_cannot_be_is_repeated_then_refused(run, monkeypatch, held_up):
    calls = []

    def probe():
        calls.append(1)
        if len(calls) <= held_up:
            time.sleep(0.03)

    monkeypatch.setattr(measuring, "probes", lambda row, case: {"probe": Contender(probe)} if row.against else {})
    code, shown, found = run(*SMALL, "gather_kv")
    if held_up == 3:  # in the warm-up and the two repetitions
        assert code == 0 and all(0 < r["bandwidth"]["share"] < measuring.MOST_SHARE for r in found["rows"])
        return
    assert code == 1 and len(calls) == 3 + 2 * measuring.TRIES
    for r in found["rows"]:
        assert "bandwidth" not in r and r["seconds"]["best"] > 0
        why = r["failed"]["probe probe"]
        assert re.fullmatch(r"implausible: a copy of \S+ GB/s beside a row of \S+ GB/s; is the machine busy\?", why)
        assert f"failed: gather_kv 512 float32: probe probe: {why}" in shown


def test_stopped(run, monkeypatch):
    """Ctrl-C shows the results so far; --resume continues."""
    real, seen = command.measure, []

    def measured(name, *more):
        seen.append(name)
        if seen == ["gather_kv", "lsh_bucket"]:
            raise KeyboardInterrupt
        return real(name, *more)

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(measuring, "MOST_SHARE", math.inf)
    code, shown, found = run(*SMALL, "gather_kv", "lsh_bucket")
    assert code == 130 and found["left_out"] == ["lsh_bucket 512 fp32"] and len(found["rows"]) == 2
    assert re.search(r"^gather_kv out= +512", shown, re.M) and "not measured: lsh_bucket 512 fp32" in shown
    assert "stopped; --resume --json" in shown
    code, shown, found = run("--resume", *SMALL, "gather_kv", "lsh_bucket")
    assert code == 0 and found["left_out"] == [] and seen == ["gather_kv", "lsh_bucket", "lsh_bucket"]
    assert [r["operator"] for r in found["rows"]] == ["gather_kv", "gather_kv", "lsh_bucket"]


def changed(found: dict, path: tuple, value) -> dict:
    """Return a copy with another value at a path; ... removes it."""
    made = json.loads(json.dumps(found))
    *way, last = path
    inner = made
    for x in way:
        inner = inner[x]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return made


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("rows",), ..., "machine and rows are missing"),
        (("machine",), [], "machine and rows are missing"),
        (("command",), "a\nb", "command must be a line of text"),
        (("machine", "gpu"), 3, "name must be a line of text"),
        (("repeats",), 0, "threads and repeats must be integers"),
        (("statistic",), "worst", "statistic must be best or median"),
        (("left_out",), [3], "left_out must be a list of lines"),
        (("rows", 0), 3, "row 0 must be an object"),
        (("rows", 0, "operator"), "", "row 0: operator, form and dtype must be names"),
        (("rows", 0, "dtype"), "int8", "row 0: operator, form and dtype must be names"),
        (("rows", 0, "shape"), [1, 8, 0, 64], "row 0: shape must be .batch, heads, n, head_dim."),
        (("rows", 0, "error"), None, "row 0: error must be a line of text"),
        (("rows", 0, "seconds", "best"), math.nan, "row 0: seconds must have best and median"),
        (("rows", 0, "ratio"), ..., "row 0: gb_per_s and ratio are missing"),
        (("rows", 0, "ratio", "eager"), {}, "row 0: ratio has invalid entries"),
        (("rows", 0, "bandwidth"), None, "row 0: bandwidth must have share and gb_per_s"),
        (("rows", 0, "bandwidth", "of"), 3, "row 0: bandwidth must be of something"),
        (("rows", 0, "clock"), {}, "row 0: stages are missing"),
    ],
)
def test_records_of_others(path, value, message, tmp_path):
    recorded = json.loads((RESULTS / "cpu-windows.json").read_text())
    file = tmp_path / "record.json"
    file.write_text(json.dumps(changed(recorded, path, value)))
    with pytest.raises(record.Refused, match=f"record.json: expected a record of python -m kvops.bench: {message}$"):
        record.load(file)


def test_what_is_no_record(tmp_path, monkeypatch, capsys):
    for content in (b"{", b"\xff", b"[" * 10**5, b"3"):
        (tmp_path / "file").write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["bench", "--from", str(tmp_path / "file")])
        assert command.main() == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"python -m kvops.bench: error: {tmp_path}/file: expected ")


def test_all_recorded_results_are_records():
    for file in RESULTS.glob("cpu-*.json"):
        assert (
            file.stem in ("cpu-attention", "cpu-attention-amx", "cpu-decode", "cpu-pages") or record.load(file)["rows"]
        )


def test_the_commit_is_this_project_s(tmp_path, monkeypatch):
    """An installed copy inside an unrelated repository, even if committed there, does not report that commit."""

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    def lies_at(path):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("")
        monkeypatch.setattr(record, "__file__", str(tmp_path / path))

    monkeypatch.delenv("KVOPS_COMMIT", raising=False)
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    lies_at("env/kvops/bench/record.py")
    assert record.commit() is None
    git("add", ".")
    git("commit", "-m", "with a copy")
    assert record.commit() is None
    monkeypatch.setenv("KVOPS_COMMIT", "abc")
    assert record.commit() == "abc"
    lies_at("kvops/bench/record.py")  # as in its own repository
    git("add", ".")
    git("commit", "-m", "ours")
    assert re.fullmatch("[0-9a-f]{40}", record.commit())
    Path(record.__file__).write_text("changed")
    assert record.commit().endswith("-dirty")


# The GPU's side of it, on the CPU: events that read the clock, graphs that call again what was called in their capture.


@pytest.fixture
def pretend_gpu(monkeypatch):
    captured = []
    rounds = gpu.Replayed._rounds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e3 * (end.time - self.time)

    class Capture:
        def __init__(self, graph):
            self.graph = graph

        def __enter__(self):
            captured.clear()

        def __exit__(self, kind, *_):
            if kind is None:
                self.graph.replay = partial(rounds, *captured)

    def record(self):
        captured[:] = [self]
        rounds(self)

    monkeypatch.setattr(gpu.Replayed, "_rounds", record)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "l2_bytes", lambda: 1 << 18)
    monkeypatch.setattr(gpu, "memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(gpu, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(gpu, "MOST_CALLS", 16)
    monkeypatch.setattr(gpu, "SHORT", 1e-4)
    monkeypatch.setattr(measuring, "on_gpu", lambda case: True)
    monkeypatch.setattr(measuring, "MOST_SHARE", math.inf)
    yield
    gpu._buffers.cache_clear()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.batch == 1])
def test_rows_of_a_gpu(name, pretend_gpu):
    row = ROWS[name]
    heads, n = (row.shape[0], min(row.shape[1], N)) if row.shape else (2, N)
    results = measure(name, row, Case(n, torch.float32, heads, d=64), 2, compiled=False)
    assert [r["form"] for r in results] == list(row.forms)
    for r in results:
        assert "error" not in r and not r["failed"] and set(r["clock"].values()) == {"graph"}
        assert r["copies"] == max(1, min(16, -(-(1 << 21) // r["bytes"])))
        assert r["gb_per_s"] == pytest.approx(r["bytes"] / r["seconds"]["median"] / 1e9)
        assert ("bandwidth" in r) == bool(row.against)
        assert set(r["ratio"]) == {"eager", *row.peers(Case(n, torch.float32, heads, d=64))}
        assert set(r["stages"]) == set(row.stages) and "goals" not in r  # too few tokens
        if row.against:
            share = r["bandwidth"]
            assert share["share"] * share["gb_per_s"] == pytest.approx(r["gb_per_s"])
            assert share["same_bytes"]["share"] * share["same_bytes"]["gb_per_s"] == pytest.approx(r["gb_per_s"])


def test_copies_of_the_inputs_fit_in_the_memory(pretend_gpu, monkeypatch):
    """lsh_bucket reads few of its keys: hundreds of copies would fit in the L2 cache, but not in the memory."""
    row, case, keys = ROWS["lsh_bucket"], Case(4096, torch.float32, 2, 64), 4 * 2 * 4096 * 64
    row.args(case)
    assert 3 * keys < case.held < 3.5 * keys  # K, and the sources of K and V
    for memory, count in ((1 << 40, 16), (4 * 8 * case.held, 8), (case.held, 1)):
        monkeypatch.setattr(gpu, "memory_bytes", lambda memory=memory: memory)
        assert len(measuring.make_cases(row, Case(4096, torch.float32, 2, 64))) == count


def test_probes_copy_in_pieces(pretend_gpu, monkeypatch):
    monkeypatch.setattr(gpu, "PIECE_BYTES", 1 << 16)
    sizes, copy_ = [], torch.Tensor.copy_
    source, target = gpu._buffers("cpu")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y: sizes.append(y.nbytes) or copy_(x, y))
    moved = (1 << 19) + 80
    for name, probe in gpu.copy_probes(moved, "cpu").items():
        for call in probe.calls:
            sizes.clear()
            call()
            assert 2 * sum(sizes) == gpu.copied(name, moved) and max(sizes) == 1 << 16
        assert len(sizes) == (16 if name == "large" else 5)
    assert torch.equal(source, target)


def test_batch_of_a_gpu(pretend_gpu):
    case = Case(N, torch.bfloat16, heads=1, d=16, batch=32)
    (result,) = measure("compact_kv_, batch 32", ROWS["compact_kv_, batch 32"], case, 2, compiled=False)
    assert result["shape"] == [32, 1, N, 16] and result["bytes"] == 4 * 32 * N // 4 * 16 * 2


def test_copies_of_the_inputs_are_taken_in_turn(pretend_gpu):
    order = []
    rival = gpu.Replayed([lambda: order.append("a"), lambda: order.append("b")], [lambda: order.append("restore")])
    rival.warm_up()
    assert rival.clock == "graph" and rival.rounds == 1
    order.clear()
    assert rival.sample() >= 0 and order == ["restore", "a", "b"]
    rival = gpu.Replayed([lambda: order.append("a"), lambda: order.append("b")])
    rival.warm_up()  # no time at all: as many as fit
    order.clear()
    rival.sample()
    assert 1 < rival.rounds <= 8 and order == ["a", "b"] * rival.rounds


def test_what_cannot_be_captured_is_timed_by_events(pretend_gpu, monkeypatch):
    class Fails:
        def __init__(self, graph):
            pass

        def __enter__(self):
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "graph", Fails)
    done = []
    rival = gpu.Replayed([lambda: done.append(1)])
    rival.warm_up()
    assert rival.clock == "events, not capturable (operation not permitted when stream is capturing)"
    done.clear()
    rival.sample()
    assert len(done) == rival.rounds > 1


def test_one_that_fails_leaves_the_others(pretend_gpu):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB\nand so on")

    row, case = ROWS["gather_kv"], Case(N, torch.float32, 2, 64)
    fresh, out = measure("gather_kv", replace(row, eager=fail), case, 2, compiled=False)
    why = "CUDA out of memory. Tried to allocate 64.00 GiB"
    assert fresh["ratio"] == {} and fresh["failed"] == {"eager": why} and "seconds" in out
    forms = {"out=": fail, "fresh": row.forms["fresh"]}
    out, fresh = measure("gather_kv", replace(row, forms=forms), case, 2, compiled=False)
    assert out["error"] == why and "seconds" not in out and fresh["gb_per_s"] > 0


def test_what_leaves_its_result_unwritten_is_not_timed(pretend_gpu):
    row, case = ROWS["gather_kv"], Case(N, torch.float32, 2, 64)
    (result,) = measure("gather_kv", replace(row, forms={"out=": lambda c: c.out[0].zero_()}), case, 2, compiled=False)
    assert "unwritten" in result["error"]


@functools.cache
def measured_rows() -> list[dict]:
    """The rows of a record, measured once, with `pretend_gpu`."""
    rows = []
    for name, row in ROWS.items():
        for n in [row.shape[1]] if row.shape else [N // 2, N]:
            for dtype in (torch.float32, torch.bfloat16):
                rows += measure(name, row, Case(n, dtype, 1, 16), 1, compiled=False)
    return rows


@pytest.fixture
def gpu_record(pretend_gpu, monkeypatch):
    """A record like a GPU's, with made-up times."""
    monkeypatch.setattr(measuring, "GOALS_FROM", N)
    monkeypatch.setattr(gpu, "copies", lambda moved, held: 1)
    rows = copy.deepcopy(measured_rows())
    for r in rows:
        r["seconds"] = {"best": 20e-6, "median": 20e-6}
        r["stages"] = dict.fromkeys(r["stages"], 0.05)
        if "bandwidth" in r:
            r["bandwidth"]["share"] = 0.83
        r["ratio"]["eager"]["median"] = 19.0
    rows[0]["failed"] = {"compile": "no Triton"}
    rows[1]["clock"]["eager"] = "events, not capturable (because)"
    rows[-1] = {x: rows[-1][x] for x in ("operator", "form", "dtype", "shape")} | {"error": "CUDA out of memory"}
    made_up = {"name": "Made-up GPU", "driver": "1.2", "cuda": "13.0"}
    return {
        "machine": {"gpu": made_up, "cpu": "any", "threads": 2},
        **{"kvops": "0", "torch": "2", "isa": "v4", "commit": "abc", "command": "made up", "statistic": "median"},
        "rows": rows,
        "left_out": ["lag_score 1048576 fp32"],
    }


def test_goals(gpu_record):
    found = {(g.what, g.wanted): g for g in goals(gpu_record)}
    assert found[f"anchor_cosine, n {N}, float32", ">= 88% of copy"][2:] == ("83%", False)
    assert found[f"lag_score, n {N}, float32", ">= 82% of copy"].reached
    assert found[f"keydiff_compress fresh, n {N}, bfloat16", ">= 77% of copy"].reached
    assert found[f"lagkv_compress out=, n {N}, float32", ">= 20x eager"][2:] == ("19x", False)
    assert found[f"select_topk, n {N}, float32", ">= 5x eager"].reached
    assert found[f"keydiff_compress out=, n {N}, float32", "select_topk < 10 % of it"][2:] == ("5.0%", True)
    assert found["keydiff_compress, 4096 tokens fresh, n 4096, float32", "< 25 us"][2:] == ("20.0 us", True)
    assert (f"compact_kv_, batch 32 in place, n {N}, float32", ">= 88% of copy") in found
    assert not any("compress in place" in what for what, _ in found)


def test_a_record_is_shown_and_drawn(gpu_record, tmp_path, monkeypatch, capsys):
    file, picture = tmp_path / "gpu.json", tmp_path / "out" / "gpu.png"
    file.write_text(json.dumps(gpu_record))
    monkeypatch.setattr(sys, "argv", ["bench", "--from", str(file), "--plot", str(picture)])
    assert command.main() == 0
    shown = capsys.readouterr().out
    assert "Made-up GPU, driver 1.2, CUDA 13.0" in shown and "made up, commit abc" in shown
    head = next(line for line in shown.splitlines() if line.startswith("operator")).split()
    assert {"same", "bytes", "select", "eager", "compile"} < set(head) and "parts" not in head
    assert re.search(r"^lag_score .* failed( .*)?$", shown, re.M)  # under torch.compile
    last = gpu_record["rows"][-1]
    assert re.search(rf"^{re.escape(last['operator'])}.* failed$", shown, re.MULTILINE)
    assert f"failed: {last['operator']} 64 bfloat16: kvops fresh: CUDA out of memory" in shown
    assert f"failed: lag_score {N // 2} float32: compile: no Triton" in shown
    assert f"lag_score {N // 2} bfloat16: eager timed by events, not capturable (because)" in shown
    assert "not measured: lag_score 1048576 fp32" in shown
    assert re.search(r"Goals: \d+ of \d+ reached", shown) and "MISSED   anchor_cosine" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_jobs_of_a_gpu(monkeypatch):
    """The most important jobs come first, and jobs that do not fit are skipped."""
    a = SimpleNamespace(ops=list(ROWS), n=command.CUDA_N, dtype=["bf16", "fp32"], heads=8, device="cuda")
    found = command.jobs(a)
    sizes = [job.n for job in found if not ROWS[job.name].shape]
    assert sizes == sorted(sizes, key=command.CUDA_N.index) and set(sizes) == set(command.CUDA_N)
    assert {job.n for job in found if job.name == "compact_kv_, batch 32"} == {16384, 131072}
    assert {(job.heads, job.n) for job in found if job.name.endswith("4096 tokens")} == {(8, 4096)}
    place = {str(job): i for i, job in enumerate(found)}
    wanted = ["lag_score 131072 bf16", "window_attention, decode 131072 bf16", "lag_score 131072 fp32"]
    wanted += ["keydiff_compress 131072 bf16", "protokv_compress 131072 fp32", "rope_at_slots 131072 bf16"]
    wanted += ["lag_score 16384 bf16", "rope_at_slots 16384 fp32", "lag_score 1048576 bf16"]
    assert [place[x] for x in wanted] == sorted(place[x] for x in wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("seconds", [None, 1e-9])
def test_a_run_in_which_all_fails_still_leaves_a_record(seconds, tmp_path, monkeypatch, capsys):
    file = tmp_path / "gpu.json"
    said = ["--ops", "gather_kv", "--n", "512", "--json", str(file), "--plot", str(tmp_path / "gpu.png")]
    a = command.arguments(said)
    a.device, a.seconds = "cuda", seconds
    monkeypatch.setattr(command, "arguments", lambda argv: a)
    monkeypatch.setattr(record, "gpu", lambda: {"name": "None", "driver": "0", "cuda": "0"})
    monkeypatch.setattr(command, "usable", lambda: True)
    assert command.main() == (0 if seconds else 1)
    found = json.loads(file.read_text())
    assert found["statistic"] == "median" and found["machine"]["gpu"]["name"] == "None"
    shown = capsys.readouterr().out
    if seconds:
        assert found["left_out"] == ["gather_kv 512 fp32", "gather_kv 512 bf16"] and found["rows"] == []
        assert "not measured: gather_kv 512 bf16" in shown
    else:
        assert [r["form"] for r in found["rows"]] == ["out=", "fresh"] * 2 and all("error" in r for r in found["rows"])
        assert "failed: gather_kv 512 float32: kvops out=: " in shown


@pytest.fixture
def on_cuda(monkeypatch, tmp_path):
    """Run the command as if on a GPU, with these arguments and this function instead of measure()."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(command, "build_info", lambda: {"cuda": {"why": ""}})
    monkeypatch.setattr(command, "show", lambda *_: None)
    monkeypatch.setattr(record, "gpu", lambda: {"name": "None", "driver": "0", "cuda": "0"})

    def run(measured, *arguments: str) -> tuple[int, dict]:
        file = tmp_path / "gpu.json"
        monkeypatch.setattr(command, "measure", measured)
        monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda", "--json", str(file), *arguments])
        return command.main(), json.loads(file.read_text())

    return run


def result(name: str, case: Case) -> dict:
    label = {"operator": name, "form": "", "dtype": str(case.dtype).removeprefix("torch."), "shape": [1, 1, case.n, 1]}
    return {**label, "seconds": {"best": 1.0, "median": 1.0}, "gb_per_s": 1.0, "ratio": {}}


def test_another_process_goes_on_when_one_has_lost_the_gpu(on_cuda, tmp_path, monkeypatch, capsys):
    """Each row is in the file before the next starts, and the file lists the missing ones."""
    seen, ops = [], ["--resume", "--n", "1024", "512", "--dtype", "bf16", "--ops", "lag_score", "gather_kv"]

    def measured(name, row, case, *_):
        if seen:
            found = json.loads((tmp_path / "gpu.json").read_text())
            assert len(found["rows"]) + len(found["left_out"]) >= 4 and f"{name} {case.n} bf16" in found["left_out"]
        seen.append((name, case.n))
        if (name, case.n) == ("gather_kv", 1024):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for ...")
        return [result(name, case)]

    monkeypatch.setattr(command, "usable", lambda: seen[-1] != ("gather_kv", 1024))
    code, found = on_cuda(measured, *ops)
    assert code == command.LOST and found["left_out"] == ["lag_score 512 bf16", "gather_kv 512 bf16"]
    code, found = on_cuda(measured, *ops)
    assert code == 1 and found["left_out"] == [] and len(found["rows"]) == 5
    assert seen == [("lag_score", 1024), ("gather_kv", 1024), ("lag_score", 512), ("gather_kv", 512)]
    assert {r.get("error") for r in found["rows"]} == {None, "CUDA error: an illegal memory access was encountered"}
    assert on_cuda(measured, *ops, "--repeats", "3")[0] == 2
    assert "was measured with repeats 20, this is 3" in capsys.readouterr().err


def test_a_kernel_that_hangs_is_given_up(on_cuda, tmp_path, monkeypatch):
    code, ended = [], threading.Event()

    def measured(name, row, case, *_):
        assert ended.wait(30)
        return []

    monkeypatch.setattr(command, "STUCK", 0.01)
    monkeypatch.setattr(command.os, "_exit", lambda x: (code.append(x), ended.set()))
    with pytest.raises(ValueError):  # the record has it: here the process is still there
        on_cuda(measured, "--n", "512", "--dtype", "bf16", "--ops", "lag_score", "--compile")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert code == [command.LOST] and found["left_out"] == []
    assert found["rows"][0]["error"] == "no result within 0.01 s"


@pytest.mark.parametrize("option, compiled", [([], [512, 1024]), (["--compile", "512"], [512]), (["--compile"], [])])
def test_what_is_compiled(on_cuda, option, compiled):
    seen = []

    def measured(name, row, case, repeats, compiled):
        seen.extend([case.n] if compiled else [])
        return [result(name, case)]

    on_cuda(measured, "--n", "512", "1024", "--dtype", "bf16", "--ops", "lag_score", *option)
    assert seen == compiled


def test_a_table_to_paste(gpu_record, tmp_path, monkeypatch, capsys):
    file, page = tmp_path / "gpu.json", tmp_path / "gpu.md"
    file.write_text(json.dumps(gpu_record))
    monkeypatch.setattr(sys, "argv", ["bench", "--from", str(file), "--markdown", str(page)])
    assert command.main() == 0 and f"wrote {page}" in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert lines[0] == "kvops 0 · Made-up GPU, driver 1.2, CUDA 13.0 · torch 2, commit abc"
    assert lines[-1] == "Not measured: lag_score 1048576 fp32."
    rows = [x for x in lines if x.startswith("| ")]
    assert len(rows) == 2 + len(gpu_record["rows"]) and {x.count("|") for x in rows} == {7}
    assert f"| anchor_cosine | {N} | fp32 | 20 us | 83% of copy | >= 88% of copy: **missed**, 83% |" in rows
    assert f"| lag_score | {N} | fp32 | 20 us | 83% of copy | >= 82% of copy: reached |" in rows
    assert any("| failed |  | CUDA out of memory |" in x for x in rows)


def test_what_laq_costs(tmp_path, capsys):
    pytest.importorskip("transformers")
    import laq_cost

    laq_cost.main(f"--device cpu --tokens 128 --heads 4 --budget 32 --repeats 1 --json {tmp_path / 'laq.json'}".split())
    seconds = json.loads((tmp_path / "laq.json").read_text())["seconds"]
    steps = {"a step of decode, full cache", "a step of decode, the budget"}
    assert set(seconds) == {"prefill", "own part", "lookahead, eager"} | steps and all(x > 0 for x in seconds.values())
    assert "own part" in capsys.readouterr().out
    text = laq_cost.report(
        {"prefill": 1.0, "own part": 0.009, "lookahead, eager": 0.3, "lookahead, one CUDA graph": 0.092}
    )
    assert "reached  own part: < 1% of the prefill: 0.90%" in text
    assert "MISSED   own part and lookahead, one CUDA graph: < 10% of the prefill: 10.10%" in text


def test_steps_of_heads_that_differ(tmp_path, capsys):
    """Both caches hold as many rows, in about as many bytes, and the heads of one differ."""
    import ragged

    ragged.main(["--budgets", "64", "128", "--rounds", "2", "--json", str(tmp_path / "ragged.json")])
    rows = json.loads((tmp_path / "ragged.json").read_text())["rows"]
    assert [(x["dtype"], x["budget"]) for x in rows] == [(x, n) for x in ("bf16", "fp32") for n in (64, 128)]
    for row in rows:
        assert sum(row["lengths"]) == 8 * row["budget"] and min(row["lengths"]) * 4 < max(row["lengths"])
        assert row["bytes"]["adaptive"] < 1.5 * row["bytes"]["per_head"] and row["ratio"] > 0
    assert "ms, adaptive" in capsys.readouterr().out


def test_steps_in_rounded_rows(tmp_path, capsys):
    import rounded_step

    file = tmp_path / "rounded-step.json"
    rounded_step.main(
        ["--tokens", "96", "200", "--groups", "1", "4", "--bytes", "900000", "--rounds", "2", "--json", str(file)]
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(x["tokens"], x["group"], x["layers"]) for x in rows] == [
        (n, g, m) for n, m in ((96, 3), (200, 2)) for g in (1, 4)
    ]
    for row in rows:
        assert set(row["seconds"]) == {"bf16", "int8", "fp8"} and min(row["ratio"]["int8"], row["ratio"]["fp8"]) > 0
    assert "ms, bf16" in capsys.readouterr().out


def test_decode_in_small(tmp_path, capsys):
    """A row for each method and both baselines; ratios are to the attention over as many tokens."""
    pytest.importorskip("transformers")
    from kvops.bench import decode

    file = tmp_path / "decode.json"
    options = ["--budget", "128", "--heads", "1", "--steps", "10", "--json", str(file)]
    assert decode.main(["--dtype", "fp32", *options]) == 0
    shown, rows = capsys.readouterr().out, json.loads(file.read_text())["rows"]
    by_name = {x["method"]: x for x in rows}
    assert list(by_name) == [*decode.policies(128), decode.FLOOR, decode.BASELINE] and all(x in shown for x in by_name)
    floor = by_name[decode.FLOOR]["seconds"]["median"] / 128
    for x in rows:
        assert x["dtype"] == "fp32" and x["budget"] == 128 and x["seconds"]["mean"] > 0
        assert x["of_attention"] == pytest.approx(x["seconds"]["mean"] / (floor * x["mean_tokens"]))
        assert x["faster"] == pytest.approx(by_name[decode.BASELINE]["seconds"]["median"] / x["seconds"]["mean"])
    assert by_name["KeyDiff, buffer=1"]["mean_tokens"] == 128 < by_name["KeyDiff"]["mean_tokens"] <= 128 + 7
    assert by_name["full cache"]["mean_tokens"] > 128
    with pytest.raises(SystemExit):
        decode.main(["--budget", "64"])
    assert "--budget: expected at least 128, got 64" in capsys.readouterr().err


def test_pages_are_measured(tmp_path, capsys):
    file = tmp_path / "pages.json"
    said = ["--n", "1024", "--pages", "16", "1024", "--heads", "2", "--dtype", "bf16", "--seconds", "0"]
    assert pages.main([*said, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {x["op"] for x in found["rows"]} == set(pages.OPERATORS) and len(found["rows"]) == 2 * len(pages.OPERATORS)
    assert found["command"].startswith("python -m kvops.bench --paged --n 1024")
    assert all(set(x["ratio"]) == {"16", "1024"} and x["ratio"]["16"] > 0 for x in found["rows"])
    assert {x["op"] for x in found["fp8"]} == {*pages.OPERATORS} - {pages.READING, *pages.MOVES}
    assert all(x["n"] == 1024 and set(x["ratio"]) == {"e4m3", "e5m2"} for x in found["fp8"])
    assert [x["op"] for x in found["together"]] == ["keydiff_compress_, 64 requests", "compact_kv_, 32 layers"]
    assert all(x["n"] == 128 and x["seconds"]["one call, pages"] > 0 for x in found["together"])
    shown = capsys.readouterr().out
    assert re.search(r"^a call for each, pages +\S+ .s +\d+\.\d\dx$", shown, re.M)
    assert re.search(r"bf16, 1,024, dense +page 16 +page 1024$", shown, re.M)
    assert re.search(r"^lag_score +\S+ .s +\d+\.\d\dx +\d+\.\d\dx$", shown, re.M)
    assert re.search(r"^compact_kv_ +NHD +\S+ .s +\d+\.\d\dx +\d+\.\d\dx$", shown, re.M)
    for wrong in (
        ["--pages", "0"],
        ["--pages", "48"],
        ["--heads", "0"],
        ["--seconds", "inf"],
        ["--json", str(tmp_path)],
    ):
        with pytest.raises(SystemExit, match="2"):
            pages.main([*said, *wrong])


def test_pages_take_every_operator_of_the_schema():
    with_tables = {x.name.removeprefix("kvops::") for x in SCHEMAS if any(a.name == "block_table" for a in x.arguments)}
    assert {x.split(",")[0] for x in pages.OPERATORS if x != pages.READING} == with_tables


def test_pages_hold_the_same_rows():
    x = torch.randn(1, 3, 64, 8)
    places = torch.tensor([2, 0, 3, 1])
    for order in pages.ORDERS:
        assert torch.equal(pages.dense(x, order), x)
        view = pages.paged(x, order, 16, places)
        assert torch.equal(reference.pages_to_dense(view, places.int().view(1, -1)), x)
