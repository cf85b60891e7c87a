"""Where the tests of kernels run."""

from __future__ import annotations

import pytest

from tests.kernels.experts import BETWEEN
from tests.kernels.harness import emulated, require_gpu
from tests.kernels.metal.emulator import Emulator


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Runs the test emulated, and with ``-m gpu`` on the GPU."""
    if request.param == "gpu":
        require_gpu()
        yield "gpu"
    else:
        with emulated():
            yield "emulator"


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def whole_device(request):
    """The same for calls of several launches that leave room for absent experts between them,
    which nobody reads."""
    if request.param == "gpu":
        require_gpu()
        yield "gpu"
    else:
        with emulated(partly_written=BETWEEN):
            yield "emulator"


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device_of_a_model(request):
    """The same for whole models, emulated under one schedule: the order of threads is the business
    of the kernels' own tests."""
    if request.param == "gpu":
        require_gpu()
        yield "gpu"
    else:
        with emulated(schedules=Emulator.FIRST):
            yield "emulator"
