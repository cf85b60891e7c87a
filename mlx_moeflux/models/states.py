"""The states that a model makes: their entries, their arrays, and how long they may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.cache import ENTRIES, BaseCache, SequenceState, check_positions
from mlx_moeflux.cache.kv import KV_BITS, quantized
from mlx_moeflux.cache.state.sequence import Owner
from mlx_moeflux.cache.state.spec import DTYPE_CODES, spec_of
from mlx_moeflux.checkpoint.quantization import GROUP_SIZES
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.models.layers import decoder_layer
from mlx_moeflux.state_arrays import EntrySpec


class Stateful(Owner, Protocol):
    """A model, as far as its states depend on it."""

    config: Any

    @property
    def layers(self) -> Sequence[Any]: ...

    @property
    def dtype(self) -> mx.Dtype: ...


class States:
    """Makes, measures and checks the states of a model, which has it as ``states``.

    kv_bits, kv_group_size: As :meth:`quantize` was given them. max_context: Tokens that a sequence
    may have; None for the config's own limit.
    """

    def __init__(self, model: Stateful):
        self._model = model
        self.kv_bits: int | None = None
        self.kv_group_size = 64
        self.max_context: int | None = None
        self._entry_specs: tuple[EntrySpec, ...] | None = None

    def make(self) -> SequenceState:
        """Return an empty state: one entry per layer, as the config declares it."""
        return self.new(ENTRIES[spec.kind]() for spec in self._declared())

    def new(self, entries: Iterable[BaseCache]) -> SequenceState:
        """Return `entries` as one state of the model, with keys and values in ``kv_bits`` bits if
        set."""
        use_mlx()
        return SequenceState(map(self._quantized, entries), self._model)

    def _declared(self) -> list[EntrySpec]:
        """Return what the config declares of each layer's state."""
        config, dtype = self._model.config, DTYPE_CODES[self._model.dtype]
        return [config.state(i, dtype) for i in range(config.num_hidden_layers)]

    def _quantized(self, entry: BaseCache) -> BaseCache:
        if self.kv_bits is None or not entry.declared.grows or not entry.empty():
            return entry
        return quantized(
            type(entry),
            bits=self.kv_bits,
            group_size=self.kv_group_size,
            dtype=self._model.dtype,
        )()

    def quantize(self, bits: int | None, group_size: int = 64) -> None:
        """Store keys and values of new states in 4 or 8 bits with one scale a group; None disables.

        Raises:
            InputError: Bits or group size are not supported, or a group does not divide a row.
        """
        if bits not in (None, *KV_BITS) or group_size not in GROUP_SIZES:
            raise InputError(
                f"kv_bits is {bits!r} in groups of {group_size!r}; give 4 or 8 and groups of "
                f"{', '.join(map(str, GROUP_SIZES))}."
            )
        if bits is not None:
            for spec in self._declared():
                spec.quantized(bits, group_size)
        self.kv_bits, self.kv_group_size = bits, group_size
        self.forget_arrays()

    def forget_arrays(self) -> None:
        """Look again at what :meth:`entry_specs` returns, after a change of dtype or bits."""
        self._entry_specs = None

    def entry_specs(self) -> tuple[EntrySpec, ...]:
        """Return the arrays of each entry of :meth:`make` after a token.

        Raises:
            InputError: A layer was replaced, and what its state holds is not known.
        """
        if self._entry_specs is None:
            for i, layer in enumerate(map(decoder_layer, self._model.layers)):
                if layer is None:
                    raise InputError(
                        f"layer {i} was replaced by one whose state is not known; wrap it instead."
                    )
            specs, bits = self._declared(), self.kv_bits
            if bits is not None:
                specs = [spec.quantized(bits, self.kv_group_size) for spec in specs]
            self._entry_specs = tuple(specs)
        return self._entry_specs

    def check(self, cache: Any) -> None:
        """Raise a CacheError unless `cache` is a state that this model made, or one like it."""
        remedy = "give a state of this model's make_cache()"
        expected, layers = self.make(), self.entry_specs()
        if not isinstance(cache, (list, tuple)):
            raise CacheError(f"the cache is a {type(cache).__name__}; {remedy}.")
        if len(cache) != len(expected):
            counts = f"{len(cache)} entries and this model {len(expected)} layers"
            raise CacheError(f"the cache has {counts}; {remedy}.")
        owner = cache.owner if isinstance(cache, SequenceState) else None
        if owner is not None and owner.identity != self._model.identity:
            raise CacheError(f"the cache is a state of another model; {remedy}.")
        for i, (entry, own, spec) in enumerate(zip(cache, expected, layers, strict=True)):
            if not isinstance(entry, BaseCache) or entry.declared is not own.declared:
                what = f"a {type(entry).__name__}, this model's a {type(own).__name__}"
                raise CacheError(f"entry {i} of the cache is {what}; {remedy}.")
            if type(entry) is not type(own) or entry.empty():
                continue
            for name, array in spec_of(entry).arrays.items():
                if array.shape[1:] != spec.arrays[name].shape[1:]:
                    raise CacheError(
                        f"'{name}' of entry {i} of the cache is {list(array.shape)} and this "
                        f"model's {list(spec.arrays[name].shape)} for one sequence, rows left out "
                        f"as 0; {remedy}."
                    )

    def set_context_limit(self, limit: int | None) -> None:
        """Set how many tokens a sequence may have; None for the config's own limit.

        Raises:
            InputError: `limit` is not between 1 and ``max_position_embeddings``.
        """
        if limit is not None:
            self._model.config.check_context("max_context", limit)
        self.max_context = limit or self._model.config.max_position_embeddings

    def context_left(self, cache: Sequence[BaseCache] | None = None) -> int:
        """Return how many tokens the longest sequence of a state may still take.

        Raises:
            CacheError: The entries of `cache` have different positions.
        """
        used = max(check_positions(cache)) if cache else 0
        return (self.max_context or self._model.config.max_position_embeddings) - used
