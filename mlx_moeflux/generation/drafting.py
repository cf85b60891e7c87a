"""Drafting: what a model drafts with, and the drafts of one sequence from round to round.

A round reads the newest token and drafts as rows of one step. Row r is drawn as without drafts,
after the rows before it; while the draw equals the next draft, that draft is accepted. The first
draw that differs is the next newest token.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import MOST_ROWS, keep_rows, transaction
from mlx_moeflux.checks import check_method, shown
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.experts.policies.named import label
from mlx_moeflux.generation.draft_gate import DraftGate
from mlx_moeflux.generation.drafts import Drafts, Lookup, begun, observes, proposed
from mlx_moeflux.generation.head_drafts import HeadDrafts
from mlx_moeflux.generation.sampling import Sampled, check_drawn, check_finite
from mlx_moeflux.models.protocol import LoadedModel

MOST_DRAFTS = MOST_ROWS - 1
"""Most tokens that a step reads besides the newest one."""

OFF, AUTO = "off", "auto"
# Name -> what makes the source for a model, or returns None if the model has none. The first that
# a model has is the one of ``auto``.
SOURCES: dict[str, Callable[[LoadedModel], Drafts | None]] = {
    HeadDrafts.name: lambda model: HeadDrafts(model.prediction) if model.prediction else None,
    Lookup.name: lambda model: Lookup(),
}

Draftable = str | int | Drafts
"""What the option ``drafts`` takes."""


def check_drafts(given: Any) -> None:
    """Raise an InputError unless `given` is a value of the option ``drafts``."""
    if isinstance(given, str) and given in (OFF, AUTO, *SOURCES):
        return
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_DRAFTS:
        return
    if isinstance(given, str | int | None):
        raise InputError(
            f"drafts is {shown(given)}; give {OFF}, {AUTO}, {', '.join(SOURCES)}, a number from "
            f"1 to {MOST_DRAFTS}, or an object with begin(prompt)."
        )
    if isinstance(given, type):
        raise InputError(f"the drafts {given.__name__} are a class; pass an instance of it.")
    if not callable(getattr(given, "begin", None)):
        raise InputError(f"the drafts {label(given)} have no 'begin'; see the Drafts protocol.")
    check_method(f"begin of the drafts {label(given)}", given.begin, Drafts.begin)


def draws_on_heads(given: Draftable) -> bool:
    """Return True if a value of the option ``drafts`` uses a head of multi-token prediction, if
    there is one."""
    return given in (AUTO, HeadDrafts.name) or isinstance(given, int)


def make_drafting(given: Draftable, model: LoadedModel) -> Drafting | None:
    """Return what `model` drafts with by the option ``drafts``, or None for nothing, of which
    ``auto`` warns.

    Raises:
        InputError: It is none of the option's values, or the model has no such source.
        UnsupportedError: A layer's state cannot forget rejected rows.
    """
    check_drafts(given)
    if given == OFF:
        return None
    if not all(entry.takes_rows for entry in model.make_cache()):
        why = "a layer's state of this model cannot forget rejected drafts"
        if given == AUTO:
            warnings.warn(f"drafts '{AUTO}' drafts nothing: {why}.", stacklevel=2)
            return None
        raise UnsupportedError(f"{why}; load with drafts off.")
    if not isinstance(given, str | int):
        return Drafting(given)
    makers = [SOURCES[given]] if given in SOURCES else SOURCES.values()
    source = next(filter(None, (make(model) for make in makers)), None)
    if source is None:
        raise InputError(f"this model has no drafts '{given}'; there is {AUTO}.")
    return Drafting(source, fixed=given if isinstance(given, int) else None)


class Drafting:
    """Source of drafts of a model, and the gate that says how many of them a round reads.

    fixed: Read always so many drafts, if they are proposed; None: the gate decides by time. clock:
    Returns seconds. The holder of the model's lock calls the methods.
    """

    def __init__(
        self,
        source: Drafts,
        *,
        fixed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.source, self.fixed, self.clock = source, fixed, clock
        self.gate = DraftGate(MOST_DRAFTS)

    def begin(self, model: LoadedModel, prompt: Sequence[int], *, read: int = 0) -> Drafter:
        """Return the drafts of a sequence that begins with `prompt`. read: Tokens of it that the
        model does not read, because a prompt cache supplied their state."""
        return Drafter(self, model, prompt, read=read)

    def report(self) -> str:
        """Return what is drafted, and how the gate decided, as a phrase."""
        how = f"always {self.fixed}" if self.fixed else self.gate.report()
        return f"drafts {label(self.source)}: {how}"


class Drafter:
    """The drafts of one sequence, and the time of its steps.

    The clock runs from :meth:`resume` to :meth:`pause`, so that what a caller does with a token
    does not count. A plain step runs on while the caller has the token before it; its time is known
    with its own token.

    tokens: Ids of prompt and reply, those that the host knows.
    """

    def __init__(self, drafting: Drafting, model: LoadedModel, prompt: Sequence[int], *, read: int):
        self._drafting, self._model, self._read = drafting, model, read
        self._drafts: Any = begun(drafting.source, prompt)
        self._observes = observes(self._drafts)
        self.tokens = list(prompt)
        self._knows_newest = self._in_flight = False
        self._seconds, self._since = 0.0, drafting.clock()

    def pause(self) -> None:
        """Stop the clock: the caller gets a token."""
        self._seconds += self._drafting.clock() - self._since

    def resume(self) -> None:
        """Let the clock run: the caller asks for the next token."""
        self._since = self._drafting.clock()

    def learn(self, newest: int) -> None:
        """Note the id of the newest token, and the time of the plain step that gave it."""
        if self._knows_newest:
            return
        self.tokens.append(newest)
        self._knows_newest = True
        if self._in_flight:
            self._drafting.gate.note(0, 0, self._lap())

    def stepped(self, newest: int) -> None:
        """Note that a plain step on the newest token has begun, which gives the next newest."""
        self.learn(newest)
        self._knows_newest, self._in_flight = False, True

    def propose(self, newest: mx.array, room: int, *, ahead: bool) -> list[int]:
        """Return the drafts to read with the token `newest` ``[1]``; an empty list asks for a plain
        step.

        room: Most drafts. ahead: A plain step should begin before the host knows `newest`: wait
        for it only if something is proposed without it.

        Raises:
            InputError: The source proposed what is no draft; the sampler drew an id outside the
                vocabulary.
        """
        fixed, gate = self._drafting.fixed, self._drafting.gate
        most = min(gate.wanted() if fixed is None else fixed, room)
        if most < 1 or self._model.runtime.observers.active:
            return []
        # A source that observes proposes after the newest token alone.
        waits = self._knows_newest or self._observes or not ahead
        if not waits and not self._proposed(most + 1):
            return []
        value: Any = newest.item()
        check_drawn([value], self._model.config.vocab_size)
        self.learn(value)
        drafts = self._proposed(most)
        if drafts and fixed is None and not gate.pays(len(drafts)):
            return []
        return drafts

    def _proposed(self, most: int) -> list[int]:
        source, vocabulary = self._drafting.source, self._model.config.vocab_size
        return proposed(source, self._drafts, self.tokens, most, vocabulary)

    @contextmanager
    def observing(self) -> Iterator[list[mx.array]]:
        """Collect the hidden states of the model's calls inside the block, for :meth:`observe`, if
        the source observes them."""
        if not self._observes:
            yield []
            return
        with self._model.runtime.observers.collect_hidden() as found:
            yield found

    def observe(self, hidden: Sequence[mx.array], kept: int) -> None:
        """Give the source what was collected, the first `kept` tokens of it."""
        if self._observes:
            C = hidden[0].shape[-1]
            rows = mx.concatenate([h.reshape(1, -1, C) for h in hidden], axis=1)
            self._drafts.observe(self._read, rows[:, :kept])
        self._read += kept

    def verify(
        self,
        newest: Sampled,
        drafts: list[int],
        state: list[Any],
        sample: Callable[[mx.array, mx.array], Sampled],
        *,
        at_once: bool,
        stops: Collection[int] = (),
    ) -> Generator[tuple[int, mx.array, Sampled], None, None]:
        """Read the one token of `newest` and `drafts` as rows of one step of `state`. Yield the
        token and each accepted draft, the last if it is in `stops`: its id, its logprobs ``[V]``,
        and the token that follows it.

        When a token is yielded, what follows it is drawn and no more, as without drafts. At the
        end, however it comes, the state holds the tokens that were yielded.

        sample: Returns the token after the last of the rows ``[R]`` that are read, from the logits
        ``[1, V]`` after it: ``sample(logits, rows)``. at_once: A draw needs none before it; all are
        scheduled before the first is awaited.
        """
        model, misses, given = self._model, self._misses(), 0
        rows: Any = mx.concatenate([newest.tokens.astype(mx.uint32), mx.array(drafts, mx.uint32)])
        with model.runtime.lock, transaction(state):
            with self.observing() as hidden:
                logits = model.read_rows(rows[None], state)
            draws = (sample(logits[:, r], rows[: r + 1]) for r in range(rows.size))
            if at_once:
                draws = iter(list(draws))
            mx.eval(logits)
            model.runtime.start_eval()
        misses, following_id = self._misses() - misses, -1
        try:
            for value, draft in zip(rows.tolist(), [*drafts, None], strict=True):
                with model.runtime.lock:
                    following = next(draws)
                    drawn: Any = following.tokens.item()
                following_id = int(drawn)
                check_finite(newest.finite, len(self.tokens) - 1 + given)
                given += 1
                self.pause()
                yield value, newest.logprobs.squeeze(0), following
                self.resume()
                newest = following
                if value in stops or following_id != draft:
                    break
        finally:
            with model.runtime.lock:
                keep_rows(state, given)
        check_drawn([following_id], newest.logprobs.shape[-1])
        with model.runtime.lock:
            self.observe(hidden, given)
            self._note(drafts, given, following_id, misses)

    def _misses(self) -> int:
        """Return how many experts steps have missed so far."""
        if self._model.store.streaming is None:
            return 0
        return sum(layer.misses for layer in self._model.store.stats().layers.values())

    def _note(self, drafts: list[int], given: int, newest: int, misses: int) -> None:
        """Note a round that gave `given` tokens: the newest one of before and accepted drafts.

        newest: The first draw that is no draft, or the one after the last draft. misses: Experts
        that the round missed.
        """
        lap, accepted, gate = self._lap(), given - 1, self._drafting.gate
        saved = gate.saved_by(given, lap)
        gate.note(len(drafts), accepted, lap)
        self._model.store.stats().drafts.add(
            len(drafts), accepted, misses=misses, seconds=lap, saved=saved
        )
        self.tokens += drafts[:accepted]
        self._knows_newest = self._in_flight = False
        self.learn(newest)

    def _lap(self) -> float:
        self.pause()
        self.resume()
        lap, self._seconds = self._seconds, 0.0
        return lap
