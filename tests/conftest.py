"""The operators' tests on three kinds of device; see kit.every_device."""

import pytest
import torch

import kit
import kvops

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


def pytest_configure(config):
    config.addinivalue_line("markers", 'only(*devices): only on these: "cpu", "cuda", "simulator"')


def pytest_terminal_summary(terminalreporter):
    if kit.SIMULATED:
        terminalreporter.write_line("simulated: " + " ".join(kit.simulated_operators()))
