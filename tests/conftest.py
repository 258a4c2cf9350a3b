"""The operators' tests on three kinds of device; see kit.every_device."""

import pytest
import setuptools  # noqa: F401  # before anybody imports distutils, of which torch.compile needs the one of setuptools
import torch

import kit
import kvops
from kvops.bench import gpu

if kit.SIMULATED:
    kvops._lib.load(kit.SIMULATED)  # its kernels take the place of the CPU's


@pytest.fixture(params=kit.DEVICES)
def device(request):
    """Makes the device the one that tensors are made on."""
    if (only := request.node.get_closest_marker("only")) and request.param not in only.args:
        pytest.skip("only for " + " and ".join(only.args))
    if request.param != "cuda":
        yield
        return
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def one_thread():
    """Models as small as those of the tests only lose by sharing their steps, most of all on a busy machine."""
    with kit.threads(1):
        yield


def pytest_collection_modifyitems(items):
    items.sort(key=in_simulator)  # last, as they have the longest to wait for


@pytest.fixture(scope="session", autouse=True)
def outcomes(request):
    """Simulated runs take minutes: they begin with the first test, beside the others, most of which use one core."""
    simulated = [x for x in request.session.items if in_simulator(x)]
    if not simulated or simulated[0].module.cuda_include() is None:
        yield None
        return
    begun = simulated[0].module.Outcomes([x.callspec.params["name"] for x in simulated])
    yield begun
    begun.close()


def in_simulator(item) -> bool:
    return item.path.name == "test_simulated.py"


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """A kernel's illegal access ends all that its process does on the GPU: what comes after would only seem to fail."""
    if report.failed and kit.HAS_CUDA and not gpu.usable():
        pytest.exit("this process has lost the GPU", returncode=2)


def pytest_configure(config):
    config.addinivalue_line("markers", 'only(*devices): only on these: "cpu", "cuda", "simulator"')
    config.addinivalue_line("markers", 'full: only in `make test-all`, as it takes minutes; pytest -m "" runs all')


def pytest_terminal_summary(terminalreporter):
    if kit.SIMULATED:
        terminalreporter.write_line("simulated: " + " ".join(kit.simulated_operators()))
