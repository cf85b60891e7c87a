"""Oracle: the signatures of what samples; a field that they lack or value otherwise is a fault."""

from __future__ import annotations

import inspect

import pytest

from mlx_moeflux.errors import InputError
from mlx_moeflux.generation.sampling import (
    SamplingOptions,
    make_logits_processors,
    make_sampler,
)
from mlx_moeflux.generation.sampling_fields import (
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    SamplingField,
    check_sampling,
)

MADE = {
    name: parameter.default
    for make in (make_sampler, make_logits_processors)
    for name, parameter in inspect.signature(make).parameters.items()
}


@pytest.mark.parametrize("field", SAMPLING_FIELDS.values(), ids=lambda field: field.name)
def test_a_field_is_a_keyword_with_its_default(field: SamplingField):
    assert MADE[field.name] == field.default
    assert field.name in SamplingOptions.__annotations__
    assert not field.window or field.window in MADE
    low, high = field.range
    assert field.default is None or low <= field.default <= high


@pytest.mark.parametrize("field", REQUEST_FIELDS.values(), ids=lambda field: field.name)
def test_what_requests_may_give_can_be_sampled(field: SamplingField):
    low, high = field.requested
    assert field.range[0] <= low <= field.off <= high <= field.range[1]
    assert field.label
    for value in (field.off, field.least_on or low):
        make = make_logits_processors if field.window else make_sampler
        make(**{field.name: value})


def test_a_value_outside_its_range_names_the_field():
    check_sampling(temp=0.0, top_k=3)
    with pytest.raises(InputError, match=r"^min_p is 2; .* at most 1\.0\.$"):
        check_sampling(top_p=1.0, min_p=2)
    with pytest.raises(InputError, match=r"top_k is 0\.5"):
        check_sampling(top_k=0.5)
