"""Install a wheel into a fresh environment and call its operators there.

    python tests/package/smoke_wheel.py --wheel dist/kvops-....whl --torch 2.13.0 [--index-url URL] [--no-deps]
    python tests/package/smoke_wheel.py --here      in the environment of this Python, which has torch and kvops

It needs no pytest, no source tree beside it and no compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
    cuda = "loaded" if info["cuda"]["loaded"] else info["cuda"]["why"]
    libc = "-".join(platform.libc_ver())
    print(f"passed: Python {platform.python_version()}, torch {torch.__version__}, {libc}, CUDA kernels: {cuda}")


def check_wheel(wheel: Path, torch: str, index_url: str | None, no_deps: list[str] | None) -> None:
    with tempfile.TemporaryDirectory(prefix="kvops-smoke-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir"]
        index = ["--index-url", index_url] if index_url else []
        if no_deps is None:
            subprocess.run([*pip, *index, f"torch=={torch}"], check=True)
        else:
            subprocess.run([*pip, *index, "--no-deps", f"torch=={torch}"], check=True)
            subprocess.run([*pip, *no_deps], check=True)
        subprocess.run([*pip, wheel.resolve()], check=True)
        env = {x: y for x, y in os.environ.items() if x not in ("PYTHONPATH", "KVOPS_ISA")}
        subprocess.run([python, Path(__file__).resolve(), "--here"], cwd=folder, env=env, check=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="check the kvops of this environment")
    parser.add_argument("--wheel", type=Path, help="the wheel to install (default: the newest in dist/)")
    parser.add_argument("--torch", help="the torch to install first, for example 2.13.0 or 2.10.*")
    parser.add_argument("--index-url", help="the package index for torch")
    parser.add_argument("--no-deps", nargs="*", metavar="PACKAGE", help="install torch alone, and then these packages")
    a = parser.parse_args(argv)
    if a.here:
        check_here()
        return 0
    wheels = sorted((ROOT / "dist").glob("kvops-*.whl"), key=lambda x: x.stat().st_mtime)
    wheel = a.wheel or (wheels[-1] if wheels else None)
    if wheel is None or not wheel.exists():
        parser.error(f"no wheel {wheel or 'in dist/'}; run: make wheel")
    if not a.torch:
        parser.error("--torch is missing: name the version of torch to install")
    check_wheel(wheel, a.torch, a.index_url, a.no_deps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
