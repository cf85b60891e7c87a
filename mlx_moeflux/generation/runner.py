"""Computes the steps of a batch: prompts are read into it, tokens sampled and drafts verified."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import SequenceState, transaction
from mlx_moeflux.cache.paged import KVPool, PagedCache
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.generation.drafting import Drafter
from mlx_moeflux.generation.loop import CLEAR_EVERY
from mlx_moeflux.generation.prefill import Prefill, Request
from mlx_moeflux.generation.sampling import (
    Sampled,
    Sampler,
    check_drawn,
    check_finite,
    drawn,
    greedy,
    normalised,
    processed,
)
from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.protocol import LoadedModel


class Batch:
    """Sequences that take every step together, under the caller's names. Not thread-safe.

    ``names``: In the order of the rows of :meth:`step`. ``entries``: Their state, an entry a layer.
    kv_pool_bytes: Keep keys and values in blocks of a pool of this size, so that nothing is copied
    when sequences join or leave; None gives each layer one buffer as long as the longest sequence.

    Raises:
        InputError: The pool has no room for one block.
        UnsupportedError: There is a pool, and the model's attention has an indexer.
    """

    def __init__(self, model: LoadedModel, *, kv_pool_bytes: int | None = None):
        self.model = model
        self.names: list[Any] = []
        self.pool = None if kv_pool_bytes is None else KVPool(model.state_spec(), kv_pool_bytes)
        self.entries: list[Any] = []
        self._paged: dict[int, PagedCache] = {}
        if self.pool is not None:
            specs = model.state_spec().entries
            for i, (entry, spec) in enumerate(zip(model.make_cache(), specs, strict=True)):
                if "index_keys" in spec.arrays:
                    raise UnsupportedError(
                        "a KV pool holds no index keys, and this model's attention has an indexer; "
                        "leave kv_pool_bytes out."
                    )
                if entry.declared.grows:
                    windowed = model.config.windowed
                    self._paged[i] = PagedCache(self.pool, spec, type(entry), windowed=windowed)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states, padding and reserve included."""
        return sum(entry.nbytes for entry in self.entries)

    def join(self, names: Sequence[Hashable], state: Sequence[Any]) -> None:
        """Append the sequences of a state, of one sequence or merged of several.

        The caller must not use the state afterwards.

        Raises:
            InputError: A name is taken, or names and sequences differ in number.
            CacheError: The pool is full.
        """
        names = list(names)
        if len({*self.names, *names}) < len(self.names) + len(names):
            raise InputError(f"a sequence of {names} is in the batch already; use other names.")
        if any(entry.batch_size != len(names) for entry in state):
            raise InputError(f"{len(names)} names for a state of {state[0].batch_size} sequences.")
        if self.pool is not None:
            for entry in self._paged.values():
                entry.flush()
            self.pool.admit(state[0].seen())
        if not self.names:
            self.entries = [
                self._paged[i] if i in self._paged else type(entry).merge([entry])
                for i, entry in enumerate(state)
            ]
        for i, (mine, theirs) in enumerate(zip(self.entries, state, strict=True)):
            if self.names or i in self._paged:
                mine.extend(theirs)
        self.names += names

    def leave(self, names: Iterable[Hashable]) -> None:
        """Remove these sequences and free their memory."""
        gone = set(names)
        keep = [i for i, name in enumerate(self.names) if name not in gone]
        if len(keep) == len(self.names):
            return
        self.names = [self.names[i] for i in keep]
        if keep or self._paged:
            for entry in self.entries:
                entry.filter(keep)
        if self.pool is not None:
            self.pool.release(keep)
        if not keep:
            self.entries = []

    def state(self, name: Hashable) -> SequenceState:
        """Return a copy of one sequence's state.

        Raises:
            InputError: The sequence is not in the batch.
        """
        if name not in self.names:
            raise InputError(f"sequence {name} is not in the batch; there are {self.names}.")
        i = self.names.index(name)
        return self.model.states.new(entry.extract(i) for entry in self.entries)

    def step(self, tokens: mx.array) -> mx.array:
        """Append one token to each sequence, ``[B]`` in the order of `names`; return lazy logits
        ``[B, V]``.

        A call that raises changes no state.

        Raises:
            InputError: There is not one token per sequence. CacheError: The pool is full.
        """
        if not isinstance(tokens, mx.array) or tokens.shape != (len(self.names),):
            array = isinstance(tokens, mx.array)
            found = f"have shape {list(tokens.shape)}" if array else f"are {describe(tokens)}"
            raise InputError(
                f"tokens {found}, expected [{len(self.names)}]: one for each sequence."
            )
        return self.model(tokens[:, None], cache=self.entries, last_only=True)[:, -1]

    def evaluate(self, *arrays: mx.array) -> None:
        """Evaluate the results of :meth:`step` and the states."""
        mx.eval(arrays, [entry.state for entry in self.entries])
        self.model.runtime.start_eval()

    def transaction(self):
        """Return a context that rolls all states back if its block raises."""
        return transaction(self.entries)


def sampled(
    model: LoadedModel,
    logits: mx.array,
    sequences: list[Request],
    *,
    pending: Sequence[mx.array] = (),
) -> Sampled:
    """Sample tokens from logits ``[B, V]`` of `model`.

    Each row takes its own sequence's processors and sampler; rows of one sampler are sampled
    together. pending: Arrays ``[B]`` of tokens that are not in the replies yet.
    """
    if any(sequence.processors for sequence in sequences):
        rows = []
        for i, sequence in enumerate(sequences):
            row = logits[i : i + 1]
            if sequence.processors:
                unread = [tokens[i : i + 1] for tokens in pending]
                row = processed(sequence.processors, sequence.seen(unread), row)
            rows.append(row)
        logits = mx.concatenate(rows)
    logprobs, finite = normalised(logits)
    groups: dict[Sampler, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.sampler, []).append(i)
    if len(groups) == 1:
        return Sampled(model.runtime.lead(drawn(sequences[0].sampler, logprobs)), logprobs, finite)
    parts = [drawn(sampler, logprobs[mx.array(rows)]) for sampler, rows in groups.items()]
    order = [i for rows in groups.values() for i in rows]
    places = sorted(range(len(order)), key=order.__getitem__)
    return Sampled(model.runtime.lead(mx.concatenate(parts)[mx.array(places)]), logprobs, finite)


class Runner:
    """Computes the steps of a :class:`~mlx_moeflux.generation.batch.BatchGenerator`, and owns the
    newest tokens of its batch. The holder of the model's lock calls the methods.

    keep_states: The caller takes the state of each reply with its last token.
    """

    def __init__(self, model: LoadedModel, batch: Batch, *, keep_states: bool):
        self.model, self.batch = model, batch
        # One step ahead hides the host's work behind a GPU's. A state that the caller takes
        # contains the last token, which must go through the model before its sequence leaves.
        self._ahead = keep_states or device.kind() != "cpu"
        self._may_draft = not keep_states and batch.pool is None
        self._newest: Any = None  # Sampled, not read yet
        self._returned = True  # whether the newest tokens are
        # The sequence that is alone since some steps, and its drafts.
        self._drafts: tuple[Request, Drafter] | None = None
        self._steps = 0

    @contextmanager
    def drafting(self, *, alone: bool) -> Iterator[None]:
        """Let the only sequence read drafts inside the block, if it is `alone` with no prompts
        beside it. An error ends its drafts, which begin anew at the next step."""
        known, self._drafts = self._drafts, None
        if not alone or not self._may_draft or self.model.drafting is None or len(self.batch) != 1:
            yield
            return
        (sequence,) = self.batch.names
        if known is None or known[0] is not sequence:
            known = sequence, self._begin_drafts(sequence)
        self._drafts, (_, drafter) = known, known
        drafter.resume()
        try:
            yield
        except BaseException:
            self._drafts = None
            raise
        drafter.pause()

    def prepare(self) -> None:
        """Compute the tokens that :meth:`step` returns, unless they are computed ahead."""
        if not self._ahead and len(self.batch) and self._returned:
            self._newest = self._advance()
            self._returned = False

    def read(self, prefill: Prefill, size: int | None, until: float | None) -> bool:
        """Read a part of prompts, see :meth:`Prefill.advance`. Return True if they are read: the
        live ones have joined the batch with their first tokens."""
        logits = prefill.advance(size, until)
        if logits is None:
            return False
        sequences = prefill.live
        prefill.keep()
        if not sequences:
            return True
        first = sampled(self.model, logits, sequences)
        mx.eval(first)
        ids: Any = first.tokens.tolist()
        check_drawn(ids, first.logprobs.shape[-1])
        self.batch.join(sequences, prefill.entries)
        if self._newest is not None:
            pairs = zip(self._newest, first, strict=True)
            first = Sampled(*(mx.concatenate(list(pair)) for pair in pairs))
        self._newest, self._returned = first, False
        for sequence in sequences:
            sequence.state = sequence.logits = None
        return True

    def step(self, stops: Collection[int]) -> list[tuple[Request, int, mx.array]]:
        """Return the newest token of every sequence with its logprobs ``[V]``, and accepted drafts
        up to an id of `stops`; the caller appends them to the replies."""
        if verified := self._verify(stops):
            return verified
        newest, sequences = self._newest, list(self.batch.names)
        if self._ahead:
            self._newest = self._advance()
        else:
            self._returned = True
        check_finite(newest.finite, max(len(s.prompt) + len(s.reply) for s in sequences))
        rows = enumerate(zip(sequences, newest.tokens.tolist(), strict=True))
        return [(sequence, token, newest.logprobs[i]) for i, (sequence, token) in rows]

    def end_step(self, ended: list[Request]) -> None:
        """Remove the sequences that ended, and clear MLX's freed buffers now and then."""
        self.remove(ended)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()

    def remove(self, gone: list[Request]) -> None:
        """Remove these sequences and their newest tokens."""
        if not gone:
            return
        keep = [i for i, sequence in enumerate(self.batch.names) if sequence not in gone]
        self.batch.leave(gone)
        if not keep:
            self._newest = None
        else:
            rows = mx.array(keep)
            self._newest = Sampled(*(array[rows] for array in self._newest))

    def close(self) -> None:
        """Free all states."""
        self.remove(list(self.batch.names))

    def _begin_drafts(self, sequence: Request) -> Drafter:
        tokens = [*sequence.prompt, *sequence.reply]
        read = len(tokens) - (not self._ahead and self._returned)
        drafter = self.model.drafting.begin(self.model, tokens[:read], read=read)
        for newest in tokens[read:]:
            drafter.learn(newest)
        return drafter

    def _verify(self, stops: Collection[int]) -> list[tuple[Request, int, mx.array]]:
        """Return what :meth:`step` returns, with drafts; an empty list if none are proposed."""
        if self._drafts is None:
            return []
        (sequence, drafter), newest = self._drafts, self._newest
        # The last token takes a plain step, as in a loop.
        room = min(sequence.limit, sequence.reserved) - len(sequence.reply) - 2
        drafts = drafter.propose(newest.tokens, room, ahead=self._ahead)
        if not drafts:
            return []

        def sample(logits: mx.array, read: mx.array) -> Sampled:
            pending = [read[i : i + 1] for i in range(read.size)]
            return sampled(self.model, logits, [sequence], pending=pending)

        found, at_once = [], sequence.sampler is greedy and not sequence.processors
        rows = drafter.verify(
            newest, drafts, self.batch.entries, sample, at_once=at_once, stops=stops
        )
        with self.batch.transaction(), closing(rows):
            for token, logprobs, following in rows:
                found.append((sequence, token, logprobs))
                newest = following
        self._newest, self._returned = newest, False
        return found

    def _advance(self) -> Sampled:
        """Run the model on every sequence's newest token and sample the next ones."""
        if self._drafts is None:
            return self._decode()
        _, drafter = self._drafts
        if not self._ahead:
            drafter.stepped(self._newest.tokens.item())
        with drafter.observing() as hidden:
            following = self._decode()
        if self._ahead:
            drafter.stepped(self._newest.tokens.item())
        drafter.observe(hidden, 1)
        return following

    def _decode(self) -> Sampled:
        tokens = self._newest.tokens
        pending = [tokens] if self._ahead else []
        with self.batch.transaction(), self.model.runtime.ahead():
            logits = self.batch.step(tokens)
            if any(sequence.processors for sequence in self.batch.names):
                # A processor may wait for `tokens`; the model goes on meanwhile.
                mx.async_eval(logits)
                self.model.runtime.start_eval()
            following = sampled(self.model, logits, self.batch.names, pending=pending)
            if self._ahead:
                mx.async_eval(following)
                self.model.runtime.start_eval()
            else:
                self.batch.evaluate(*following)
            # Wait inside the transaction, which an interrupt rolls back.
            mx.eval(self._newest)
            read = self._newest if self._ahead else following
            drawn: Any = read.tokens.tolist()
            check_drawn(drawn, read.logprobs.shape[-1])
            return following
