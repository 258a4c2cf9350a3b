"""Compare kvops' decode attention with kernels that pip installs: one layer, one new token, on a CPU with one thread.

    python bench/peers/decode_attention.py [--json FILE]        # those of requirements-decode.txt that it finds

All run in turns on the same q, K and V, in turn in so many layers that they exceed the processor's caches, and the
medians of their CPU times are compared: these do not depend on other work on the machine. The largest error of each is
recorded too. Dtypes that a kernel does not have are left out.

- torch: `scaled_dot_product_attention` with `enable_gqa`; the same with a group's query heads as rows of one head
  ("rows"), which a single new token allows; and compiled `flex_attention`, with rows.
- onnxruntime: `GroupQueryAttention`, which appends the token in place.
- llama.cpp: ggml's `flash_attn_ext`, from the libraries of llama-cpp-python, or of --ggml FOLDER.
- Not here: vLLM's kernel, which works in blocks of its own (bench/experiments/vllm_attention.py), and OpenVINO's fused
  one, which works on a cache inside its models; its operation alone takes several times as long as all of these.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.metadata
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import kvops
from kvops.bench.columns import aligned
from kvops.bench.measure import cpu_seconds
from kvops.bench.record import origin, write

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = (1024, 4096, 16384, 65536)
BYTES = 400_000_000  # of all layers' keys and values
WRONG = 0.25  # an error of which no rounding is the reason; what is not attention is about 1 off
Call = Callable[[], Tensor]


def grouped(q: Tensor) -> Tensor:
    """Give a group's query heads as rows of one head: [1, Hq, 1, d] -> [1, Hk, Hq / Hk, d]."""
    return q.view(1, KV_HEADS, -1, HEAD_DIM)


def with_kvops(q: Tensor, k: Tensor, v: Tensor) -> Call:
    return lambda: kvops.attention(q, k, v).out


def with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Call:
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def with_rows(q: Tensor, k: Tensor, v: Tensor) -> Call:
    return lambda: F.scaled_dot_product_attention(grouped(q), k, v)


def with_flex(q: Tensor, k: Tensor, v: Tensor) -> Call:
    return lambda: flex()(grouped(q), k, v)


@functools.cache
def flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def with_onnxruntime(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """The last token is given beside the others, and the cache has room for it."""
    import onnxruntime as ort

    session, n = onnx_session(q.dtype), k.shape[2]
    binding = session.io_binding()
    rows = [x.reshape(1, 1, -1) for x in (q, k[:, :, -1], v[:, :, -1])]
    for name, x in zip(("query", "key", "value"), rows):
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(x.numpy()))
    for name, x in (("past_key", k), ("past_value", v)):
        value = ort.OrtValue.ortvalue_from_numpy(x.numpy())
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(name.replace("past", "present"), value)
    binding.bind_cpu_input("seqlens_k", np.array([n - 1], dtype=np.int32))
    binding.bind_cpu_input("total_sequence_length", np.array(n, dtype=np.int32))
    out = ort.OrtValue.ortvalue_from_shape_and_type([1, 1, QUERY_HEADS * HEAD_DIM], rows[0].numpy().dtype)
    binding.bind_ortvalue_output("output", out)

    def call() -> Tensor:
        session.run_with_iobinding(binding)
        return torch.from_numpy(out.numpy())

    return call


def onnx_session(dtype: torch.dtype) -> Any:
    import onnxruntime as ort
    from onnx import TensorProto, helper

    of = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}[dtype]  # bf16: not on a CPU
    inputs = {
        "query": [1, 1, QUERY_HEADS * HEAD_DIM],
        "key": [1, 1, KV_HEADS * HEAD_DIM],
        "value": [1, 1, KV_HEADS * HEAD_DIM],
        "past_key": [1, KV_HEADS, "n", HEAD_DIM],
        "past_value": [1, KV_HEADS, "n", HEAD_DIM],
    }
    outputs = {"output": inputs["query"], "present_key": inputs["past_key"], "present_value": inputs["past_value"]}
    counts = {"seqlens_k": [1], "total_sequence_length": []}
    node = helper.make_node(
        "GroupQueryAttention",
        [*inputs, *counts],
        [*outputs],
        domain="com.microsoft",
        num_heads=QUERY_HEADS,
        kv_num_heads=KV_HEADS,
    )
    infos = [helper.make_tensor_value_info(name, of, shape) for name, shape in inputs.items()]
    infos += [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name, shape in counts.items()]
    results = [helper.make_tensor_value_info(name, of, shape) for name, shape in outputs.items()]
    model = helper.make_model(
        helper.make_graph([node], "attention", infos, results),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Ggml:
    """ggml's libraries, and a backend with one thread."""

    TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}

    class Parameters(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    def __init__(self, folder: Path):
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        for library, names in (
            (self.base, ("init", "new_tensor_4d", "get_data", "flash_attn_ext", "new_graph", "version")),
            (self.cpu, ("backend_cpu_init",)),
        ):
            for name in names:
                getattr(library, f"ggml_{name}").restype = ctypes.c_void_p
        self.base.ggml_init.argtypes = [self.Parameters]
        self.backend = ctypes.c_void_p(self.cpu.ggml_backend_cpu_init())
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, 1)

    @property
    def version(self) -> str:
        return ctypes.string_at(self.base.ggml_version()).decode()

    def tensor(self, context: ctypes.c_void_p, x: Tensor) -> ctypes.c_void_p:
        sizes = [ctypes.c_int64(size) for size in reversed(x.shape)]
        made = ctypes.c_void_p(self.base.ggml_new_tensor_4d(context, self.TYPES[x.dtype], *sizes))
        ctypes.memmove(self.base.ggml_get_data(made), x.data_ptr(), x.nbytes)
        return made

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Call:
        """q becomes fp32, the only dtype that it takes."""
        size = q.numel() * 4 + k.nbytes + v.nbytes + (1 << 20)
        context = ctypes.c_void_p(self.base.ggml_init(self.Parameters(size, None, False)))
        given = [self.tensor(context, x) for x in (q.float(), k, v)]
        numbers = [ctypes.c_float(x) for x in (HEAD_DIM**-0.5, 0.0, 0.0)]
        result = ctypes.c_void_p(self.base.ggml_flash_attn_ext(context, *given, None, *numbers))
        graph = ctypes.c_void_p(self.base.ggml_new_graph(context))
        self.base.ggml_build_forward_expand(graph, result)
        data = (ctypes.c_float * q.numel()).from_address(self.base.ggml_get_data(result))
        out = torch.frombuffer(data, dtype=torch.float32)

        def call() -> Tensor:
            if self.base.ggml_backend_graph_compute(self.backend, graph):
                raise RuntimeError("ggml_backend_graph_compute failed")
            return out

        weakref.finalize(call, self.base.ggml_free, context)
        return call


def folder_of_ggml() -> Path | None:
    """Return where llama-cpp-python has its libraries."""
    found = importlib.util.find_spec("llama_cpp")
    folders = [Path(x) / "lib" for x in found.submodule_search_locations or ()] if found else []
    return next((x for x in folders if (x / "libggml-base.so").exists()), None)


def kernels(ggml: Ggml | None) -> dict[str, Callable[[Tensor, Tensor, Tensor], Call]]:
    """Return the kernels that are installed."""
    found = {"kvops": with_kvops, "sdpa": with_sdpa, "sdpa, rows": with_rows, "flex": with_flex}
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        found["onnxruntime"] = with_onnxruntime
    if ggml:
        found["llama.cpp"] = ggml.attention
    return found


def layers(n: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(n)
    for _ in range(max(2, -(-BYTES // (2 * KV_HEADS * n * HEAD_DIM * dtype.itemsize)))):
        shapes = (1, QUERY_HEADS, 1, HEAD_DIM), *[(1, KV_HEADS, n, HEAD_DIM)] * 2
        q, k, v = (torch.randn(x, generator=generator).to(dtype) for x in shapes)
        yield q, k, v


def error_of(found: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the largest difference from attention in fp32, relative to the largest element of that."""
    want = F.scaled_dot_product_attention(grouped(q.float()), k.float(), v.float()).flatten()
    return float((found.float().flatten() - want).abs().max() / want.abs().max())


def measure(dtype: str, n: int, rounds: int, ggml: Ggml | None) -> dict[str, Any]:
    """Return the median CPU seconds of each kernel; None for those that do not have this dtype."""
    torch.compiler.reset()  # it compiles a function for a few shapes at most
    given = [*layers(n, DTYPES[dtype])]
    calls: dict[str, list[Call]] = {}
    errors: dict[str, float] = {}
    for name, make in (rivals := kernels(ggml)).items():
        try:
            own = [make(*x) for x in given]
            found = own[0]()
        except Exception as error:  # each has its own
            if name == "kvops":
                raise
            print(f"{name} has no {dtype}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        errors[name], calls[name] = error_of(found, *given[0]), own
        if not errors[name] <= WRONG:
            raise RuntimeError(f"{name}, {dtype}, {n} tokens: this is not attention, it is {errors[name]:.2g} off")

    def all_layers(name: str) -> None:
        """In a row, so that the next kernel finds none of them in a cache."""
        for call in calls[name]:
            call()

    medians = cpu_seconds({name: partial(all_layers, name) for name in calls}, rounds)
    seconds = {name: medians[name] / len(given) if name in medians else None for name in rivals}
    return {"dtype": dtype, "tokens": n, "bytes": given[0][1].nbytes * 2, "seconds": seconds, "errors": errors}


def table(found: list[dict]) -> str:
    """Return the times as multiples of kvops'."""
    names = [x for x in found[0]["seconds"] if x != "kvops"]
    rows = [["dtype", "tokens", "kvops", *names]]
    for x in found:
        own = x["seconds"]["kvops"]
        others = [x["seconds"][name] for name in names]
        rows.append([x["dtype"], f"{x['tokens']:,}", f"{1e3 * own:.3g} ms"])
        rows[-1] += ["–" if y is None else f"{y / own:.2f}x" for y in others]
    return aligned(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=9, help="timed turns")
    parser.add_argument("--ggml", type=Path, help="folder of libggml-base.so and libggml-cpu.so")
    parser.add_argument("--json", type=Path, help="write a record")
    a = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder, found = a.ggml or folder_of_ggml(), []
    ggml = Ggml(folder) if folder else None
    with torch.inference_mode():
        for dtype in a.dtypes:
            for n in a.tokens:
                found.append(measure(dtype, n, a.rounds, ggml))
                print(found[-1], file=sys.stderr)
    print(table(found))
    if a.json:
        versions = {"ggml": ggml.version} if ggml else {}
        if importlib.util.find_spec("onnxruntime"):
            versions["onnxruntime"] = importlib.metadata.version("onnxruntime")
        command = "python", "bench/peers/decode_attention.py", *(sys.argv[1:] if argv is None else argv)
        write(a.json, origin(*command) | {"versions": versions, "cells": found})


if __name__ == "__main__":
    main()
