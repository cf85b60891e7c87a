"""Options of load: one list for both functions, misspelt names, safe mode."""

from __future__ import annotations

import inspect

import mlx.core as mx
import pytest

from mlx_moeflux import load, load_model
from mlx_moeflux.errors import InputError
from mlx_moeflux.loading import BUNDLED_MODEL, LoadOptions


def test_load_declares_every_option_of_load_model():
    parameters = list(inspect.signature(load_model).parameters.values())[1:]
    types = {name: kind.__forward_arg__ for name, kind in LoadOptions.__annotations__.items()}
    assert {parameter.name: parameter.annotation for parameter in parameters} == types


@pytest.mark.parametrize("function", [load, load_model])
def test_a_misspelt_option_is_refused_with_the_nearest_name(function):
    with pytest.raises(InputError) as caught:
        function(BUNDLED_MODEL, expert_memori="1GB")
    name = function.__name__
    assert str(caught.value) == (
        f"{name} has no option 'expert_memori'; did you mean 'expert_memory'?"
    )
    with pytest.raises(InputError, match=r"there are .*expert_memory"):
        function(BUNDLED_MODEL, zzz=1)


def test_load_suggests_its_own_options_too():
    with pytest.raises(InputError, match="'revision'"):
        load(BUNDLED_MODEL, revison="main")


def test_safe_uses_references_eager_steps_and_no_prefetch():
    tokens = mx.array([[5, 6, 7]])
    with load_model(BUNDLED_MODEL, expert_memory="50%", safe=True) as model:
        assert set(model.kernels.names().values()) == {"reference"}
        assert model.compile_steps is False
        cache = model.make_cache()
        mx.eval(model(tokens, cache), model(tokens[:, :1], cache))
        assert model._step.traces == model._segments.traces == 0
        assert model.store.stats().total.proposed == 0


@pytest.mark.parametrize("option", [{"kernels": "auto"}, {"prefetch": "ahead"}])
def test_safe_excludes_other_choices(option):
    with pytest.raises(InputError, match="safe excludes"):
        load_model(BUNDLED_MODEL, safe=True, **option)
