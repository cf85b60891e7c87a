"""Oracle: the same model with one place of experts, which gives the same bits."""

import argparse
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cli.common import add_load_arguments, load_options
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError, InputError
from mlx_moeflux.experts.io.readers import READERS, make_reader
from mlx_moeflux.loading import load_model
from tests.experts.helpers import random_experts, same_bits, write_experts
from tests.faults.test_preloaded import TWIN, fp8, gguf, moeflux, stock

SOURCES = [name for name in READERS if name != "memory"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A packed model, and a copy in a directory with a comma."""
    root = tmp_path_factory.mktemp("places")
    first = convert(TWIN, root / "first")
    shutil.copytree(first, root / "a,copy")
    return [first, root / "a,copy"]


IDS = mx.array([[3, 5, 7, 11, 2, 40, 9, 17]])


@pytest.mark.parametrize("reader", SOURCES)
def test_a_model_reads_from_all_places(places, reader):
    # Direct reads take memory for each thread of each place.
    options = {"expert_memory": "90%", "expert_reader": reader, "expert_threads": 1}
    with (
        load_model(places[0], **options) as one,
        load_model(places[0], expert_path=places, **options) as two,
    ):
        assert same_bits(one(IDS), two(IDS))
        assert f"reader {reader} from 2 places:" in str(two.plan)
        stats = two.store.stats()
        assert list(stats.places) == list(map(str, places))
        assert sum(p.bytes_read for p in stats.places.values()) == stats.total.bytes_read > 0
        two.release()
        assert same_bits(one(IDS), two(IDS))
        assert one.experts_identity() == two.experts_identity()


@pytest.mark.parametrize("form", [stock, moeflux, fp8, gguf])
def test_published_forms_have_copies_too(tmp_path, form):
    (tmp_path / "first").mkdir()
    first, _ = form(tmp_path / "first")
    if first.is_dir():
        second = shutil.copytree(first, tmp_path / "second")
    else:
        second = shutil.copy(first, tmp_path / "second.gguf")
    options = {"expert_memory": "97%", "expert_threads": 1}
    with (
        load_model(first, **options) as one,
        load_model(first, expert_path=[first, second], **options) as two,
    ):
        assert same_bits(one(IDS), two(IDS))
        assert all(place.bytes_read for place in two.store.stats().places.values())


def test_one_place_is_as_before(places):
    with load_model(places[0], expert_memory="60%", expert_path=places[1:]) as model:
        assert np.isfinite(np.array(model(IDS))).all()
        assert not model.store.stats().places


def test_wrong_places_are_one_line(places, tmp_path):
    first = str(places[0])

    def refused(kind, message, paths, **options):
        with pytest.raises(kind, match=message) as caught:
            load_model(first, expert_path=paths, expert_memory="60%", **options)
        assert "\n" not in str(caught.value)

    (tmp_path / "link").symlink_to(first)
    refused(InputError, "expert_path has .*link twice", [first, tmp_path / "link"])
    for wrong in ([], [first, ""], 5, [first, None], ""):
        refused(InputError, "expert_path is .*; give a directory, or a list", wrong)
    refused(CheckpointError, "nowhere is not a directory", [first, tmp_path / "nowhere"])
    refused(CheckpointError, "is no copy of the first expert_path", [first, TWIN])
    refused(InputError, "'memory' reads every expert once", places, expert_reader="memory")
    own = make_reader("pread", write_experts(tmp_path, random_experts(), "packed").refs)
    refused(InputError, "of your own reads one place; give one", places, reader=own)
    own.close()


def test_commas_separate_places_on_the_command_line():
    parser = argparse.ArgumentParser()
    add_load_arguments(parser, "expert_path")
    given = load_options(parser.parse_args(["--expert-path", "/a,/b c"]))
    assert given == {"expert_path": ["/a", "/b c"]}
