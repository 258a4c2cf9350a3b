"""Properties of every operator in the schema, tested with its calls in calls.py: graphs, repeats, any address."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import kit
from calls import CALLS, OPERATORS_CALLS, Inputs, direct, inputs
from test_schema import OPERATORS, SCHEMAS

pytestmark = kit.every_device
every_operator = pytest.mark.parametrize("op", OPERATORS)
every_call = pytest.mark.parametrize("name", OPERATORS_CALLS)
SMALL = dict(n=80, d=16, dv=8)


@functools.cache
def made(**options) -> Inputs:
    return inputs(0, **options)


def fresh(**options) -> Inputs:
    return made(**options).map(lambda x: kit.on_device(x.clone()))


def calls_of(op: str) -> list[str]:
    return [name for name in OPERATORS_CALLS if name.split(",")[0] == op]


@every_operator
def test_every_argument_is_given(op):
    """Each overload has calls, and each of its arguments has a non-default value in one of them.

    The exception is block_table: test_pages.py passes it to every call.
    """
    given = set()
    for name in calls_of(op):
        overload, arguments = direct(name, fresh(**SMALL))
        defaults = {x.name: x.default_value for x in overload._schema.arguments if x.has_default_value()}
        given |= {(overload._name, x) for x, value in arguments.items() if value != defaults.get(x, ...)}
    schemas = {f"{x.name}.{x.overload_name}".rstrip("."): x for x in SCHEMAS if x.name == f"kvops::{op}"}
    arguments = {(name, x.name) for name, schema in schemas.items() for x in schema.arguments}
    assert given == {x for x in arguments if x[1] != "block_table"}


def outcome(overload, arguments: dict) -> list[torch.Tensor]:
    """Return a call's results and written tensors."""
    written = [arguments[x.name] for x in overload._schema.arguments if x.alias_info]
    return [x for x in tree_leaves((overload(**arguments), written)) if x is not None]


# Graphs. Simulated kernels use the CPU's graphs.


def without_nan(x: Inputs) -> Inputs:
    """Return the calls without NaN in their results, because opcheck treats NaN as a difference."""
    finite = {name: getattr(x, name).nan_to_num(0, 1, -1) for name in ("scores", "segments", "means")}
    clusters = torch.arange(x.n, dtype=torch.int32).remainder(x.means.shape[2]).expand_as(x.assignment)
    whole = dict(starts=torch.zeros_like(x.starts), lengths=torch.full_like(x.lengths, x.n))
    return dataclasses.replace(x, **finite, **whole, assignment=clusters)


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_call
def test_opcheck(name, dtype):
    overload, arguments = direct(name, without_nan(fresh(**SMALL, dtype=dtype)))
    torch.library.opcheck(overload, (), arguments)


@kit.only("cpu", "cuda")
@every_operator
def test_compile(op):
    calls = [CALLS[name] for name in calls_of(op)]

    @torch.compile(fullgraph=True)
    def compiled(x):
        return [y + 1 for call in calls for y in call(x)]

    torch.compiler.reset()
    for layout in ("bhnd", "bnhd"):
        x, y = (fresh(**SMALL) for _ in range(2))
        for z in (x, y):
            z.q, z.k, z.v = (kit.laid_out(rows, layout) for rows in (z.q, z.k, z.v))
        with torch.no_grad():
            expected = [z + 1 for call in calls for z in call(x)]
            assert kit.same(compiled(y), expected) and kit.same(y.tensors(), x.tensors())


# Bit-identical repeats.


@pytest.mark.parametrize(
    "shape",
    [
        dict(b=1, heads=2, n=100, dtype=torch.float32),
        dict(b=1, heads=2, n=100, dtype=torch.float16),
        dict(b=1, heads=1, n=kit.size(9_000, 2_000), dtype=torch.bfloat16),
    ],
    ids=lambda x: f"{x['n']}-{x['dtype']}",
)
@every_call
def test_repeatable(name, shape):
    overload, arguments = direct(name, fresh(**shape))
    kit.assert_repeatable(lambda: outcome(overload, copy.deepcopy(arguments)))


# Rows at any address. All other tensors must be contiguous.

CONTIGUOUS = {
    *("anchor", "starts", "lengths", "visible", "sink_logits", "budgets"),
    *("inv_freq", "projection", "phase", "buckets", "prototypes", "cluster_scores"),
    *("mean", "cov", "centers", "norms"),
}


def rows_of(arguments: dict) -> dict[str, list[torch.Tensor]]:
    """Return the arguments that may have any address, each a tensor or a list of tensors."""
    found = {name: x if isinstance(x, list) else [x] for name, x in arguments.items() if name not in CONTIGUOUS}
    return {name: x for name, x in found.items() if isinstance(x[0], torch.Tensor)}


def moved(arguments: dict, name: str, f) -> dict:
    """Copy the arguments and apply f to one of them. Shared tensors stay shared."""
    copies = {id(x): x.clone() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
    copies |= {id(x): f(x) for x in tree_leaves(arguments[name])}
    return tree_map_only(torch.Tensor, lambda x: copies[id(x)], arguments)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@every_call
def test_rows_at_any_address(name, dtype):
    """The kernel picks an access width that all addresses allow. Rows of one-byte numbers lie at even ones."""

    def elsewhere(rows: torch.Tensor) -> torch.Tensor:
        step = 1 + (rows.element_size() == 1)
        return kit.unaligned(rows, step * offset, step * gap)

    overload, arguments = direct(name, fresh(heads=2, n=72, d=40, dv=24, dtype=dtype))
    expected = outcome(overload, copy.deepcopy(arguments))
    for offset, gap in ((1, 0), (2, 0), (4, 0), (8, 8), (0, 1), (0, 2), (0, 4), (3, 5)):
        for x in rows_of(arguments):
            assert kit.same(outcome(overload, moved(arguments, x, elsewhere)), expected), (x, offset, gap)


@every_operator
def test_offsets_beyond_31_bits(op):
    """Put the last row of each row tensor there; at least one call depends on it."""
    needed, found = set(), set()
    for name in calls_of(op):
        # 5 sinks and 12 partitions of 6 tokens: LagKV's last partition reaches the end.
        overload, arguments = direct(name, fresh(b=1, heads=2, n=77, d=8, dv=8, dtype=torch.float16))
        expected = outcome(overload, copy.deepcopy(arguments))
        for x, (rows, *_) in rows_of(arguments).items():
            if rows.dtype != torch.float16 or rows.dim() < 3 or rows.shape[2] < 3:
                continue
            needed.add(x)
            assert kit.same(outcome(overload, moved(arguments, x, kit.far_apart)), expected), (name, x)
            if x.endswith("out"):
                found.add(x)
            elif arguments.get("lse") is None:  # a given lse does not match other keys
                others = moved(arguments, x, lambda y: torch.cat([y[:, :, :-1], y[:, :, :1]], 2))
                found |= {x} if not kit.same(outcome(overload, others), expected) else set()
    assert found == needed
