"""The memory traffic of the CUDA kernels, and how their grids fill a GPU: as the simulator counts it, without a GPU."""

import ctypes
import functools
import re
import subprocess

import pytest

import kit
import traffic
from test_cudasim import CXX, HERE, cuda_include, needs_headers
from test_simulated import build
from traffic import CALLS, CARDS, Counters

pytestmark = [needs_headers, pytest.mark.full]


# ---- The counters, on kernels with known traffic ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(name, *ints): the traffic of a kernel, by space and kind, on a card with four multiprocessors."""
    folder = tmp_path_factory.mktemp("traffic")
    flags = ["-std=c++20", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fPIC", "-isystem", cuda_include()]
    instrumented = ["-O1", "-fsanitize=thread", "-fno-strict-aliasing", "-fno-tree-sra"]
    for name, options in (("traffic_selftest", instrumented), ("cudasim_traffic", ["-O2"])):
        source = HERE / f"cudasim/{name}.cpp"
        subprocess.run([*CXX, *flags, *options, "-c", source, "-o", folder / f"{name}.o"], check=True)
    library = folder / "selftest.so"
    subprocess.run([*CXX, "-shared", *folder.glob("*.o"), "-o", library], check=True)
    counters = Counters(library)

    def run(name, *ints, l2=1 << 20, resident=True):
        memory = ctypes.create_string_buffer(1 << 20)
        x = ctypes.addressof(memory) + -ctypes.addressof(memory) % 512
        function = getattr(counters.library, "run_" + name)
        function.restype = ctypes.c_char_p

        def call():
            assert function(ctypes.c_void_p(x), ctypes.c_void_p(x + (1 << 19)), *ints) is None

        card = CARDS["h200"]._replace(multiprocessors=4, l2=l2)
        (launch,) = counters.count(call, card)["launches"]
        sums = {}
        for a in launch["accesses"]:
            of = sums.setdefault(("shared " if a["shared"] else "") + a["kind"], dict.fromkeys(COUNTS, 0))
            for key in COUNTS:
                of[key] += a[key]
        return launch, sums

    return run


COUNTS = ("requests", "bytes", "sectors", "least", "l1_hits", "wavefronts")


def counts(requests, size, sectors=0, least=0, l1_hits=0, wavefronts=0):
    return dict(zip(COUNTS, (requests, size, sectors, least, l1_hits, wavefronts)))


def test_coalesced_copies(run):
    launch, sums = run("copy")
    assert sums == {x: counts(32, 4096, 128, 128) for x in ("read", "write")}
    assert [launch[x] for x in ("l2_read", "l2_written", "dram_read", "dram_written")] == [4096] * 4
    assert run("copy_pieces")[1] == {x: counts(32, 16384, 512, 512) for x in ("read", "write")}
    assert run("guarded_tail", 100)[1] == {x: counts(4, 400, 13, 13) for x in ("read", "write")}


@pytest.mark.parametrize("step, sectors", [(1, 16), (2, 32), (8, 128), (64, 128)])
def test_strided_reads(run, step, sectors):
    launch, sums = run("strided", step)
    assert sums["read"] == counts(4, 512, sectors, 16) and launch["dram_read"] == 32 * sectors


@pytest.mark.parametrize("step, wavefronts", [(0, 1), (1, 1), (2, 2), (3, 1), (8, 8), (32, 32)])
def test_bank_conflicts_of_words(run, step, wavefronts):
    assert run("bank_words", step)[1]["shared read"] == counts(1, 128, least=1, wavefronts=wavefronts)


@pytest.mark.parametrize("step, wavefronts", [(0, 4), (1, 4), (2, 8), (3, 4), (8, 32), (9, 4)])
@pytest.mark.parametrize("name", ["bank_pieces", "bank_matrices"])
def test_bank_conflicts_of_16_bytes(run, name, step, wavefronts):
    assert run(name, step)[1]["shared read"] == counts(1, 512, least=4, wavefronts=wavefronts)


def test_atomics(run):
    sums = run("count_in_one")[1]
    assert sums["shared atomic"] == counts(2, 256, least=2, wavefronts=33)
    assert sums["atomic"] == counts(1, 4, 1, 1)


def test_copies_past_the_registers(run):
    launch, sums = run("fetch")
    assert sums["copy read"] == counts(2, 1024, 32, 32)
    assert sums["shared copy write"] == sums["shared read"] == counts(2, 1024, least=8, wavefronts=8)
    assert launch["dram_read"] == launch["dram_written"] == 1024


def test_what_is_no_traffic(run):
    assert run("local")[1] == {"write": counts(2, 256, 8, 8)}


@pytest.mark.parametrize("l2, times", [(1 << 20, 1), (64 << 10, 1), (32 << 10, 2)])
def test_l2(run, l2, times):
    """64 KiB, read twice in the same order, past L1: a cache that is too small keeps none of it."""
    launch, sums = run("read_twice", 16384, l2=l2)
    assert sums["read"] == counts(1024, 131072, 4096, 4096)
    assert launch["l2_read"] == 131072 and launch["dram_read"] == times * 65536


def test_l1(run):
    launch, sums = run("read_twice_by_l1", 16384)
    assert sums["read"] == counts(1024, 131072, 4096, 4096, l1_hits=2048) and launch["l2_read"] == 65536
    assert run("read_twice_by_l1", 80 * 1024)[0]["l2_read"] == 2 * 320 * 1024  # more than L1 holds


# ---- The operators ---------------------------------------------------------------------------------------------------


@functools.cache
def library():
    return build("traffic")


@pytest.fixture(scope="module")
def counted():
    return {x.call.name: x for x in traffic.measured(library(), CALLS)}


@pytest.mark.parametrize("call", CALLS, ids=[x.name for x in CALLS])
def test_traffic(counted, call):
    """At most what the table in traffic.py allows."""
    x = counted[call.name]
    for measure in ("dram", "l2", "sectors", "conflicts"):
        assert getattr(x, measure) <= getattr(call, measure), f"{measure}\n{x}"
    assert call.why or call.dram <= 1.05, "reading more than once needs a reason"


IN_PAGES = [x for x in traffic.paged_calls() if kit.in_share(x.name)]


@pytest.fixture(scope="module")
def counted_in_pages():
    return {x.call: x for x in traffic.measured(library(), IN_PAGES)}


@pytest.mark.parametrize("call", IN_PAGES, ids=lambda x: x.name)
def test_pages_cost_little_traffic(counted, counted_in_pages, call):
    """The table is small, and stays in L1 or L2."""
    paged, dense = counted_in_pages[call], counted[call._replace(page=0).name]
    for ratio in traffic.ratios(paged, dense):
        assert ratio <= traffic.MORE_OF_FEW.get(call.row, traffic.MORE_IN_PAGES), f"{ratio}\n{paged}\n{dense}"


def test_places_are_in_kernels(counted):
    """Accesses of the simulator itself do not count as a kernel's."""
    for x in counted.values():
        places = {x.places[a["place"]] for shared in (False, True) for a in x.accesses(shared)}
        assert all(re.match(r"(cuda|ops)/[\w/]+\.\w+:\d+", place) for place in places), places


def test_the_table_in_the_docs(counted):
    """python tests/cuda/traffic.py --write"""
    page = traffic.PAGE.read_text()
    written = page.split(traffic.BEGIN)[1].split(traffic.END)[0]
    for old, new in zip(written.splitlines(), traffic.table(list(counted.values())).splitlines(), strict=True):
        numbers = [[float(x) for x in re.findall(r"(?<= )\d+\.?\d*(?= )", line)] for line in (old, new)]
        assert numbers[1] == pytest.approx(numbers[0], rel=0.02, abs=0.02), f"{old}\n{new}"
        assert re.sub(r"[\d.]+", "", old) == re.sub(r"[\d.]+", "", new)


# ---- Grids -----------------------------------------------------------------------------------------------------------

LEAST_BUSY = 0.75  # fraction of the multiprocessors' time that a launch must fill, at 131,072 tokens of 8 heads
SHORT = {  # launches that need not, and why
    "lsh_bucket": "32 keys per head",
    "window_totals": "one row each",
    "window_row_scores": "4 bytes per key and query head, after an attention of 512 bytes per key",
    "attention_combine": "one row each",
    "drop_rows": "16 rows each",
    "similarity_scores": "microseconds after a quadratic search",
    "anchor_total": "one sum per head",
    "select_cluster": "one cluster per head",
    "pack_prototypes": "500 rows per head",
    "cluster_means": "one cluster each",
    "cluster_order": "one cluster each",
}


@functools.cache
def plans(card):
    return traffic.plans(library(), card)


@pytest.mark.parametrize("card", CARDS)
def test_plans(card):
    """Every launch is legal, and fills the card or is short."""
    for row, launches in plans(card).items():
        assert launches, f"{row} launches nothing"
        for x in launches:
            assert x.dynamic_bytes + x.static_bytes <= CARDS[card].shared - 1024, f"{row}: {x}"
            assert x.resident >= 1, f"{row}: {x}"
            assert x.busy >= LEAST_BUSY or x.kernel.removesuffix("_kernel") in SHORT, f"{row}: {x}"
