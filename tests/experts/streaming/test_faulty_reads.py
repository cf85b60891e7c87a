"""Oracle: a resident store. Reads that go wrong in every reader and form, a third of them, cost an
error of one line or nothing; the next call is right. tests/faults has the same below Python."""

import errno
import os
import time
from itertools import product

import numpy as np
import pytest

from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.io.file_readers import DirectReader, MmapReader, PreadReader
from tests.experts.helpers import (
    CALLS,
    FORMS,
    all_is_well,
    random_experts,
    same_bits,
    write_experts,
)

PACKED_FIRST = "packed", *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[1:])
READERS = {"pread": PreadReader, "direct": DirectReader, "mmap": MmapReader}


def faulty(kind, fault, chance):
    """A reader of `kind`, some of whose reads go wrong once `on` is set."""

    class Faulty(kind):
        on = False

        def _read_run(self, run, views):
            if self.on and chance.random() < 0.3:
                if fault == "short":
                    half = views[0].nbytes // 2
                    views[0][half:] = bytes(views[0].nbytes - half)
                    raise self.ends_early(run, run.offset + half)
                if fault == "slow":
                    time.sleep(1e-3)
                elif fault == "gone":
                    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
                elif fault == "interrupted":
                    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
                else:
                    raise self.failed(run, run.offset, OSError(errno.EIO, "Input/output error"))
            super()._read_run(run, views)

    return Faulty


FAULTS = ("short", "fails", "interrupted", "slow", "gone")
# Every fault with one reader, every reader with the first of them.
USUAL = {("pread", fault) for fault in FAULTS} | {(name, "short") for name in READERS}


@pytest.mark.parametrize("form", PACKED_FIRST)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in USUAL))
        for case in product(READERS, FAULTS)
    ],
)
def test_reads_that_go_wrong_cost_one_line(tmp_path, open_store, form, name, fault):
    experts = write_experts(tmp_path, random_experts(), form)
    resident = experts.resident()
    reader = faulty(READERS[name], fault, np.random.default_rng(3))(experts.refs)
    store = open_store(4, reader, threads=2)
    reader.on, errors = True, []
    for call in CALLS:
        try:
            assert same_bits(store.experts(3, *call), resident.experts(3, *call))
        except ExpertFileError as error:
            errors.append(str(error))
    assert bool(errors) == (fault != "slow")
    assert "\n" not in "".join(errors)
    reader.on = False
    all_is_well(store, experts)
