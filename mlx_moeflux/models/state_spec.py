"""Identity of a model's states, so that no state is used with another model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.state.spec import StateSpec
from mlx_moeflux.models.protocol import Decoder, named_parameters

# Elements of each parameter that enter the identity.
SAMPLES = 64


Parameters = Sequence[tuple[str, mx.array]]


def state_spec(model: Decoder) -> StateSpec:
    """Return identity and shapes of the states of `model`. Evaluates: SAMPLES elements of each
    parameter. Reads samples of the experts."""
    parameters = sorted(named_parameters(model))
    identity = state_identity(model, parameters)
    return StateSpec(identity, model.states.entry_specs(), model.config.vocab_size)


def state_identity(model: Decoder, parameters: Parameters) -> str:
    """Hash the checkpoint's headers, the experts' digests or samples, samples of the trunk's
    weights, the compute dtype, the router's settings, all lossy choices and the choice of kernels.

    Placement of experts and memory budget are left out: they change no bit.
    """
    router, states = model.router, model.states
    settings = {k: v for k, v in vars(router).items() if isinstance(v, (bool, int, float, str))}
    facts = [
        model.identity,
        model.experts_identity(),
        str(model.dtype),
        type(router).__qualname__,
        settings,
        list(model.store.stats().lossy),
        [states.kv_bits, states.kv_group_size] if states.kv_bits else [],
        model.kernels.identity(),
    ]
    hasher = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    hasher.update(_trunk_samples(parameters))
    return hasher.hexdigest()


def _trunk_samples(parameters: Parameters) -> bytes:
    """Return evenly spaced elements of every parameter except experts, which may be on disk."""
    pieces = []
    for name, array in parameters:
        if ".switch_mlp." not in name and array.size:
            some = array.reshape(-1)[:: max(1, array.size // SAMPLES)][:SAMPLES]
            pieces.append(mx.contiguous(some).view(mx.uint8))
    return np.array(mx.concatenate(pieces)).tobytes()
