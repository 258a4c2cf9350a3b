"""Options and fixtures of all tests; the operators' run on three kinds of device, see kit.every_device."""

import collections
import gc
import itertools
import os

# Set before torch is imported: waiting threads then leave their core to other processes, such as the simulated runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import setuptools  # noqa: F401  # before anything imports distutils: torch.compile needs setuptools' version
import torch

import kit
import kvops
from kvops.bench import gpu

if kit.SIMULATED:
    kvops._lib.load(kit.SIMULATED)  # its kernels replace the CPU kernels


@pytest.fixture(params=kit.DEVICES)
def device(request, monkeypatch):
    """Make the device the default device for new tensors. Kernels are the portable ones, whose bits do not depend on
    addresses; test_sm90.py tests Hopper's."""
    if (only := request.node.get_closest_marker("only")) and request.param not in only.args:
        pytest.skip("only for " + " and ".join(only.args))
    if "KVOPS_SM90" not in os.environ:  # test_sm90.py sets it before
        monkeypatch.setenv("KVOPS_SM90", "0")
    if request.param != "cuda":
        yield
        return
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: the tests' small models run slower with several, most of all on a busy machine."""
    with kit.threads(1):
        yield


def pytest_addoption(parser):
    parser.addoption("--share", metavar="I/N", help="one of N shares of all tests, or of the sample: I is 0 to N - 1")
    parser.addoption("--sample", metavar="N", type=int, help="one in N of each test's cases, and at least one")


@pytest.hookimpl(trylast=True)  # after -k and -m: a sample has a case of each test that they leave
def pytest_collection_modifyitems(config, items):
    # Last, because their results arrive last; first where a process of its own waits for them.
    items.sort(key=in_simulator, reverse=shared(config))
    share, sample = config.getoption("share"), config.getoption("sample")
    if sample is not None and sample < 1:
        raise pytest.UsageError(f"--sample: expected at least 1, got {sample}")
    chosen = dict.fromkeys(items)
    if sample:
        tests = collections.defaultdict(list)
        for x in items:
            tests[x.path, x.originalname].append(x)
        drawn = [[x for x in cases if in_share(x, f"0/{sample}", "sample")] or cases[:1] for cases in tests.values()]
        chosen = dict.fromkeys(itertools.chain(*drawn))
    if share:
        chosen = dict.fromkeys(x for x in chosen if in_share(x, share))
    if left_out := [x for x in items if x not in chosen]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def in_share(item, share: str, of: str = "") -> bool:
    """Return whether a test is in a share; shares that differ in `of` are independent of each other."""
    return kit.in_share(f"{of}{item.path.name}::{item.name}", share)


@pytest.fixture(scope="session")
def outcomes(request):
    """The simulated runs."""
    simulated = [x for x in request.session.items if in_simulator(x) and hasattr(x, "callspec")]
    if not simulated or simulated[0].module.cuda_include() is None:
        yield None
        return
    sample = request.config.getoption("sample")
    begun = simulated[0].module.Outcomes([x.callspec.params["name"] for x in simulated], sample)
    yield begun
    begun.close()


@pytest.fixture(scope="session", autouse=True)
def simulated_runs_begin(request):
    """Start them with the first test: they take minutes, and most other tests use one core."""
    if not shared(request.config):
        request.getfixturevalue("outcomes")


def shared(config) -> bool:
    """Whether several processes share the tests (pytest-xdist)."""
    return hasattr(config, "workerinput")


def pytest_collection_finish():
    """Exempt what has been imported, which lives as long as the process, from every garbage collection."""
    gc.collect()
    gc.freeze()


def in_simulator(item) -> bool:
    return item.path.name == "test_simulated.py"


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Stop after an illegal access in a kernel: it breaks the process' CUDA context, so all later tests would fail."""
    if report.failed and kit.HAS_CUDA and not gpu.usable():
        pytest.exit("this process has lost the GPU", returncode=2)


def pytest_configure(config):
    config.addinivalue_line("markers", 'only(*devices): only on these: "cpu", "cuda", "simulator"')
    config.addinivalue_line("markers", 'full: only in `make test-all`, as it takes long; pytest -m "" runs all')


def pytest_terminal_summary(terminalreporter):
    if kit.SIMULATED:
        terminalreporter.write_line("simulated: " + " ".join(kit.simulated_operators()))
