"""The policies of a streamed store: when they are asked, and what is done then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_moeflux.experts.asked import Asked
from mlx_moeflux.experts.balance import changes_in_order
from mlx_moeflux.experts.events import Guess
from mlx_moeflux.experts.layer import StreamedLayer
from mlx_moeflux.experts.prefetch import blocks_ahead, next_layer, proposed

if TYPE_CHECKING:
    from mlx_moeflux.experts.streamed import StreamedStore


def asked(store: StreamedStore, state: StreamedLayer, asked: Asked) -> None:
    """A call of `state` asks for experts: enter what was read ahead for it, tell everyone."""
    prefetch = store.prefetch
    if prefetch is not None:
        needed = frozenset(asked.needed)
        waited = state.land(needed, wait=store.keep_all_ahead, events=store.tell)
        if hasattr(prefetch, "waited"):
            prefetch.waited(state.layer, waited)
        state.stats.proposed += len(state.proposal)
        state.stats.foreseen += len(state.proposal & needed)
        state.proposal = frozenset()
        prefetch.asked(state.layer, asked.experts, asked.last)
    store.eviction.touch(state.layer, asked.experts, asked.last, asked.uses)


def shift(store: StreamedStore, state: StreamedLayer, least: int, *, short: bool) -> None:
    """A call of `state` is over: tell the balance, and let it share out the slots anew at the end
    of a token. least: Slots that a layer must have."""
    news = state.take_news()
    if store.balance is None:
        return
    store.balance.called(state.layer, *news)
    if not short or state.layer != store.layers[-1]:
        return
    limits = {"least": least, "most": store.num_experts, "bytes_of": store.block_bytes}
    for layer, slots in changes_in_order(store.balance, state.tokens, store.slots, **limits):
        store.generation += 1
        store._state(layer).resize(slots, store.tell)


def read_ahead(store: StreamedStore, layer: int, guess: tuple[int, ...]) -> None:
    """Begin to read what the layer after `layer` may need."""
    following = next_layer(store.layers, layer)
    if store.prefetch is None or following is None:
        return
    if guess and store.tell is not None:
        store.tell(Guess(following, guess))
    state = store._state(following)
    if state.reading_ahead:
        return
    proposal = proposed(store.prefetch, following, guess, store.num_experts)
    state.proposal = frozenset(proposal)
    blocks = blocks_ahead(store.prefetch, proposal, state.table, state.table.slots)
    if blocks:
        state.read_ahead(store._threads, blocks, state.proposal, store.tell)
