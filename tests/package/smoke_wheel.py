"""Install a wheel into a fresh environment and call its operators there.

    python tests/package/smoke_wheel.py --wheel dist/kvops-....whl --torch 2.13.0 [--index-url URL] [--no-deps]
    python tests/package/smoke_wheel.py --newest    with the newest torch and transformers
    python tests/package/smoke_wheel.py --here      in the environment of this Python, which has torch and kvops

It needs no pytest, no source tree beside it and no compiler.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages, which may be too broken to be imported."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def check_operators(device: str) -> None:
    """Compare some operators, and methods made of them, with plain PyTorch."""
    import torch

    import kvops

    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 512, 64, generator=generator).to(device)
    v = torch.randn(1, 2, 512, 64, generator=generator).to(device)
    q = torch.randn(1, 8, 16, 64, generator=generator).to(device)

    scores = torch.randn(1, 2, 512, generator=generator).to(device)
    kept = kvops.ops.select_topk(scores, k=100)
    expected = scores.topk(100).indices.sort().values
    assert torch.equal(kept.long(), expected), "select_topk differs from torch.topk"

    k_kept, v_kept = kvops.ops.gather_kv(k, v, kept)
    rows = expected.unsqueeze(-1).expand(-1, -1, -1, 64)
    assert torch.equal(k_kept, k.gather(2, rows)) and torch.equal(v_kept, v.gather(2, rows)), "gather_kv differs"

    unit = torch.nn.functional.normalize(k, dim=-1)
    anchor = torch.nn.functional.normalize(unit.mean(2, keepdim=True), dim=-1)
    similarity = (unit * anchor).sum(-1)
    found = kvops.ops.anchor_cosine(k)
    close = torch.allclose(found, similarity, atol=1e-5) or torch.allclose(found, -similarity, atol=1e-5)
    assert close, "anchor_cosine differs from the cosine with the mean key"

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kd, vd, qd = k.to(dtype), v.to(dtype), q.to(dtype)
        for name, result in {
            "keydiff_compress": kvops.keydiff_compress(kd, vd, 0.25),
            "lagkv_compress": kvops.lagkv_compress(kd, vd, 64, 0.5),
            "snapkv_compress": kvops.snapkv_compress(kd, vd, qd, 128),
        }.items():
            k_kept, v_kept, indices = result
            rows = indices.long().unsqueeze(-1).expand(-1, -1, -1, 64)
            assert k_kept.dtype == dtype and torch.equal(v_kept, vd.gather(2, rows)), f"{name} in {dtype}"

    cache = kvops.Cache(kvops.KeyDiff(budget=128))
    for chunk in k.split(64, dim=2):
        cache.append(chunk, chunk)
    assert len(cache) == 128 and cache.seen == 512, "the streaming cache"

    # An exception of the library becomes a Python exception, which takes one libstdc++ for kvops and torch.
    try:
        torch.ops.kvops.gather_kv(k[0], v[0], kept)
    except ValueError as error:
        assert "gather_kv" in str(error), error
    else:
        raise AssertionError("a wrong shape was not refused")


def check_generation() -> None:
    """A method finds the passkey in a model of transformers, whose cache it evicts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvops.hf
    from kvops import demo

    model = AutoModelForCausalLM.from_pretrained(demo.MODEL)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    text = "The pass key is 58291740. Remember it. " + demo.TEXT.read_text()[:1900]
    inputs = tokenizer(text + " What is the pass key? The pass key is ", return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    policy = kvops.LAQ(budget=0.125)  # drafts, evicts and generates
    with kvops.hf.compress(model, policy) as compressed:
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(out[0, length:])
    assert answer == "58291740", f"kvops.hf with {policy}: expected the passkey 58291740, got {answer!r}"
    kept = {x.tokens_kept for x in compressed.cache.stats()}
    assert kept == {int(policy.budget * length) + 7}, f"kvops.hf with {policy}: {compressed.stats()}"


def newer_than_supported() -> list[str]:
    """Return which of the versions are newer than kvops/supported.py has them."""
    from kvops.supported import SUPPORTED, minor

    found = {name: (x, SUPPORTED.get(name.lower())) for name, x in versions().items()}
    return [f"{name} {x} (supported: {y.span})" for name, (x, y) in found.items() if y and minor(x) > minor(y.newest)]


def check_here() -> None:
    import torch

    import kvops

    info = kvops.build_info()
    package = Path(kvops.__file__).parent
    assert not (package.parent / "CMakeLists.txt").exists(), f"kvops was imported from the source tree, {package}"
    forced = os.environ.get("KVOPS_ISA")
    assert forced in (None, info["isa"]), info
    assert Path(kvops.include_dir(), "kvops.h").is_file()
    assert Path(kvops.cmake_prefix_path(), "kvops/kvopsConfig.cmake").is_file()
    check_operators("cpu")
    if torch.cuda.is_available():
        assert info["cuda"]["loaded"], info["cuda"]["why"]
        check_operators("cuda")
    if forced:
        return
    for level in info["isa_built"][: info["isa_built"].index(info["isa"])]:
        subprocess.run([sys.executable, __file__, "--here"], env=os.environ | {"KVOPS_ISA": level}, check=True)
    command = [sys.executable, "-m", "kvops", "--json"]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert json.loads(out)["torch"] == torch.__version__
    if importlib.util.find_spec("transformers"):
        check_generation()
    cuda = "loaded" if info["cuda"]["loaded"] else info["cuda"]["why"]
    libc = "-".join(platform.libc_ver())
    if newer := newer_than_supported():
        print(f"newer than kvops/supported.py: {', '.join(newer)}")
    ran = ", ".join(f"{name} {x}" for name, x in versions().items())
    print(f"passed: {ran}, {libc}, CUDA kernels: {cuda}")


def check_wheel(
    wheel: Path, torch: str, index_url: str | None = None, no_deps: list[str] | None = None, newest: bool = False
) -> None:
    """Install torch, by a requirement such as torch==2.13.0, and the wheel, and check them.

    newest: install the newest transformers besides.
    """
    with tempfile.TemporaryDirectory(prefix="kvops-smoke-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir"]
        index = ["--index-url", index_url] if index_url else []
        if no_deps is None:
            subprocess.run([*pip, *index, torch], check=True)
        else:
            subprocess.run([*pip, *index, "--no-deps", torch], check=True)
            subprocess.run([*pip, *no_deps], check=True)
        subprocess.run([*pip, wheel.resolve(), *(["transformers"] if newest else [])], check=True)
        env = {x: y for x, y in os.environ.items() if x not in ("PYTHONPATH", "KVOPS_ISA")}
        subprocess.run([python, Path(__file__).resolve(), "--here"], cwd=folder, env=env, check=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="check the kvops of this environment")
    parser.add_argument(
        "--newest", action="store_true", help="with the newest transformers and, without --torch, torch"
    )
    parser.add_argument(
        "--wheel", type=Path, default=ROOT / "dist", help="the wheel, or a folder: the newest in it (default: dist)"
    )
    parser.add_argument("--torch", help="the torch to install first, for example 2.13.0 or 2.10.*")
    parser.add_argument("--index-url", help="the package index for torch")
    parser.add_argument("--no-deps", nargs="*", metavar="PACKAGE", help="install torch alone, and then these packages")
    a = parser.parse_args(argv)
    if a.here:
        try:
            check_here()
        except Exception as error:
            traceback.print_exc()
            ran = ", ".join(f"{name} {x}" for name, x in versions().items())
            sys.exit(f"failed: {ran}: {type(error).__name__}: {error}")
        return 0
    wheels = sorted(a.wheel.glob("kvops-*.whl"), key=lambda x: x.stat().st_mtime) if a.wheel.is_dir() else [a.wheel]
    if not wheels or not wheels[-1].exists():
        parser.error(f"no wheel {a.wheel if wheels else f'in {a.wheel}'}; run: make wheel")
    if not a.torch and not a.newest:
        parser.error("--torch is missing: name the version of torch to install")
    try:
        check_wheel(wheels[-1], f"torch=={a.torch}" if a.torch else "torch", a.index_url, a.no_deps, a.newest)
    except subprocess.CalledProcessError as error:  # what ran has said why
        sys.exit(f"failed: {' '.join(map(str, error.cmd))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
