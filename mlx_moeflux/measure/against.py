"""Compare a checkpoint's layers with those of stock mlx-lm, one layer of both at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.experts.streaming.store import DEFAULT_THREADS
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.compare_quality import PROMPTS
from mlx_moeflux.measure.stock_layers import StockLayers, check_installed
from mlx_moeflux.models import model_class, read_config
from mlx_moeflux.models.decoder import DecoderModel

# Tokens of the text, and tokens that the model adds to it.
PROMPT, REPLY = 64, 32
# Our error by mlx-lm's. Float32 itself is not known better than to FLOOR.
LIMIT, FLOOR = 2.0, 1e-5
# Share of tokens whose last experts are so close that rounding chooses among them.
CLOSE = 1 / 4
LINE = "{:<10} {:>8} {:>8} {:>6}  {:<14} {:<10} {}"
HEAD = LINE.format("part", "ours", "mlx-lm", "ratio", "other experts", "streamed", "verdict")
# `Checkpoint.form` that mlx-lm does not read -> its name.
UNREAD = {
    "packed": "a packed directory of this package",
    "moeflux": "a directory of moeflux",
    "gguf": "a GGUF file",
}


@dataclass(frozen=True)
class Part:
    """The embedding, a layer or the logits.

    ours, theirs: The error at the worst token, by the size of the exact numbers (root mean squares
        over the channels). Tokens count that go to the experts of the exact layer; NaN: there are
        none, or a number is not finite.
    moved, moved_theirs: Tokens that go to other experts; None in a part without any.
    same_bits: Whether the part has the same bits with few experts in memory and with all; None in a
        part without experts.
    """

    name: str
    tokens: int
    ours: float
    theirs: float
    moved: int | None = None
    moved_theirs: int | None = None
    same_bits: bool | None = None

    @property
    def ratio(self) -> float:
        """Our error by mlx-lm's."""
        return self.ours / max(self.theirs, FLOOR)

    @property
    def fault(self) -> str | None:
        """Return what is wrong in words, None if nothing is."""
        if self.same_bits is False:
            return "streamed and resident differ"
        if (self.moved or 0) > LIMIT * (self.moved_theirs or 0) + CLOSE * self.tokens:
            return "other experts are chosen"
        for whose, error in (("its numbers", self.ours), ("mlx-lm's numbers", self.theirs)):
            if not np.isfinite(error):
                return f"{whose} are not finite"
        if not self.ratio <= LIMIT:
            return f"more than {LIMIT:g} times mlx-lm's error"
        return None

    def __str__(self) -> str:
        """Return a line below :data:`HEAD`."""
        moved = "" if self.moved is None else f"{self.moved}, {self.moved_theirs} of {self.tokens}"
        same = {None: "", True: "same bits", False: "differs"}[self.same_bits]
        numbers = f"{self.ours:.1e}", f"{self.theirs:.1e}", f"{self.ratio:.2f}"
        verdict = "right" if self.fault is None else f"wrong: {self.fault}"
        return LINE.format(self.name, *numbers, moved, same, verdict)


@dataclass(frozen=True)
class Comparison:
    """The parts, and what is not judged by layers.

    dtype: Of the activations on both sides. whole: Whether the decoded logits have the same bits
    with few experts in memory as with all; None: all do not fit. first: Index in the reply of the
    first token that mlx-lm chooses otherwise, our id and its id; None: all are the same.
    """

    parts: Sequence[Part]
    dtype: str
    reply: int
    whole: bool | None
    first: tuple[int, int, int] | None

    @property
    def right(self) -> bool:
        """True if every part is, and the whole model has the same bits streamed as resident."""
        return self.whole is not False and all(part.fault is None for part in self.parts)

    def lines(self, decode: Callable[[int], str]) -> list[str]:
        """Return what follows the lines of the parts. decode: Returns the text of a token."""
        bits = {
            None: "the experts do not fit in memory: they were compared layer by layer only",
            True: f"{self.reply} tokens of the whole model: same bits streamed and resident",
            False: f"{self.reply} tokens of the whole model: wrong, streamed and resident differ",
        }
        if self.first is None:
            first = f"mlx-lm would reply with the same {self.reply} tokens"
        else:
            at, ours, theirs = self.first
            first = (
                f"token {at + 1} of {self.reply} of the reply is the first that differs: "
                f"{decode(ours)!r}, in mlx-lm {decode(theirs)!r} (not judged)"
            )
        right = sum(part.fault is None for part in self.parts)
        return [
            f"errors: distance of the worst token from float32 by its size, in {self.dtype}",
            "other experts: tokens that go elsewhere than in float32, ours and mlx-lm's; the "
            "errors leave them out",
            bits[self.whole],
            first,
            f"{right} of {len(self.parts)} parts are right: at most {LIMIT:g} times mlx-lm's error",
        ]


def text() -> str:
    """Return a text to compare on, of more than :data:`PROMPT` tokens."""
    return "\n".join(json.loads(PROMPTS.read_text(encoding="utf-8"))["texts"])


def check_readable(directory: Path, *, strict_config: bool) -> None:
    """Raise UnsupportedError if mlx-lm is not installed, or has not what reads or computes the
    checkpoint."""
    check_installed()
    checkpoint = open_checkpoint(directory, strict=strict_config)
    if (what := UNREAD.get(checkpoint.form)) is not None:
        raise UnsupportedError(
            f"{directory} is {what}, which mlx-lm does not read; give the checkpoint that it was "
            "made of."
        )
    config = read_config(checkpoint, strict=strict_config)
    lacking = model_class(checkpoint.config["model_type"]).lacking_in_mlx_lm(config)
    if lacking is not None:
        raise UnsupportedError(
            f"{directory}: mlx-lm has no {lacking}, so there is nothing to compare with."
        )


def compare(
    directory: Path,
    prompt: Sequence[int],
    *,
    reply: int,
    strict_config: bool = True,
    found: Callable[[Part], None] = lambda part: None,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Compare the layers of a checkpoint with those of mlx-lm on `prompt` and the `reply` tokens
    that our model adds to it greedily.

    The exact numbers are those of mlx-lm's own layers in float32 on the CPU, with the checkpoint's
    weights; see :class:`~mlx_moeflux.measure.stock_layers.StockLayers`. No code of this package and
    no GPU takes part. Both sides compute in the dtype that mlx-lm takes for the checkpoint,
    the prompt in one call and then token by token. Each layer is given what the exact layer before
    returned, rounded to that dtype, so that errors do not add up.

    The first token that differs is that of both sides' own numbers, each layer's output being the
    next one's input: where mlx-lm's reply to the same prompt would leave ours.

    found: Called with each part. say: Called with a line before what takes long.

    Memory: the trunk of our model, and one layer with all of its experts, once ours, then exact,
    then mlx-lm's. The exact one has its floats in float32 besides: of an unquantised layer three
    times its size in all.

    Raises:
        UnsupportedError: mlx-lm is not installed, or does not compute this model.
        CheckpointError: mlx-lm cannot load the checkpoint.
    """
    dtype = StockLayers(directory).embed(mx.array([prompt])).dtype
    options = {"dtype": dtype, "strict_config": strict_config}
    with ExitStack() as opened:
        model, ids, whole = _decoded(opened, directory, list(prompt), reply, options, say)
        tokens = _Tokens(mx.array([ids[:-1]]), len(prompt))
        walk = _Walk(model, directory, tokens, dtype)
        parts = []
        for part in walk.parts(say):
            parts.append(part)
            found(part)
    first = None
    differ = np.flatnonzero(walk.chosen != ids[len(prompt) :])
    if differ.size:
        at = int(differ[0])
        first = at, ids[len(prompt) + at], int(walk.chosen[at])
    return Comparison(parts, str(dtype).removeprefix("mlx.core."), reply, whole, first)


def _decoded(
    opened: ExitStack,
    directory: Path,
    prompt: list[int],
    reply: int,
    options: dict[str, Any],
    say: Callable[[str], None],
) -> tuple[DecoderModel, list[int], bool | None]:
    """Return a model whose experts are streamed, `prompt` and its greedy reply, and whether the
    logits have the same bits with all experts in memory; None: they do not fit. opened: Closes the
    model."""
    say("load the model")
    model = opened.enter_context(_loaded(directory, **options))
    say(f"choose {reply} tokens")
    ids, logits = _reply(model, prompt, reply)
    plan = model.plan
    assert plan is not None
    if not plan.resident:
        return model, ids, None
    opened.close()
    K, E = model.router.num_experts_per_tok, model.config.num_experts
    slot, block = plan.expert_bytes // E, plan.expert_bytes // (E * len(plan.slots))
    # A quarter of them, or two tokens', and what a reader may need besides; never all.
    few = max(E // 4, 2 * K) * slot + (DEFAULT_THREADS + 1) * block
    few = min(few, plan.expert_bytes - slot)
    say("load the model with few experts in memory, and compute the same tokens")
    model = opened.enter_context(_loaded(directory, expert_memory=few, **options))
    _, again = _reply(model, prompt, reply, ids[len(prompt) :])
    return model, ids, np.array_equal(logits, again)


def _loaded(directory: Path, **options: Any) -> DecoderModel:
    model = load_model(directory, **options)
    assert isinstance(model, DecoderModel)
    return model


def _reply(
    model: DecoderModel, prompt: list[int], count: int, given: Sequence[int] = ()
) -> tuple[list[int], np.ndarray]:
    """Return `prompt` and the reply of `count` tokens, the likeliest or those that are `given`, and
    the logits ``[count, V]`` before each of them."""
    cache, ids, logits = model.make_cache(), list(prompt), []
    rows: Any = model(mx.array([prompt]), cache, last_only=True)
    for step in range(count):
        if step:
            rows = model(mx.array([ids[-1:]]), cache)
        logits.append(np.array(rows[0, -1].astype(mx.float32)))
        ids.append(given[step] if given else int(logits[-1].argmax()))
    return ids, np.stack(logits)


@dataclass(frozen=True)
class _Tokens:
    """Tokens ``[1, T]``. The first `prompt` of them are one part, and each other one is a part."""

    ids: mx.array
    prompt: int

    @property
    def count(self) -> int:
        return self.ids.shape[1]

    def parts(self, array: mx.array) -> list[mx.array]:
        """Cut an array ``[1, T, ...]`` into parts."""
        return list(mx.split(array, list(range(self.prompt, self.count)), axis=1))

    def answered(self, array: mx.array) -> list[mx.array]:
        """Return what each token of the reply is chosen from: the prompt's last row of an array
        ``[1, T, ...]``, and each row after it."""
        first, *others = self.parts(array)
        return [first[:, -1:], *others]


class _Walk:
    """Takes tokens through the parts of both models and of the exact one.

    chosen: What mlx-lm chooses in the place of each token of the reply, once all parts are done.
    """

    def __init__(
        self,
        model: DecoderModel,
        directory: Path,
        tokens: _Tokens,
        dtype: mx.Dtype,
    ):
        self._model, self._tokens, self._dtype = model, tokens, dtype
        self._theirs, self._exact = StockLayers(directory), StockLayers(directory, exact=True)
        self.chosen = np.zeros(0, np.int64)

    def parts(self, say: Callable[[str], None]) -> Iterator[Part]:
        """Yield the embedding, the layers and the logits."""
        tokens, model = self._tokens, self._model
        exact, theirs = self._exact.embed(tokens.ids), self._theirs.embed(tokens.ids)
        yield _part("embedding", exact, model.embed([tokens.ids])[0], theirs)
        x, own = exact.astype(self._dtype), theirs
        for index in range(self._exact.count):
            say(f"layer {index} of {self._exact.count}")
            part, exact, own = self._layer(index, x, own)
            yield part
            x = exact.astype(self._dtype)
        say("logits")
        ids, rows = tokens.answered(tokens.ids), tokens.answered(x)
        whole = [mx.concatenate(each, axis=1) for each in (ids, rows)]
        exact = self._exact.logits(whole[:1], [whole[1].astype(mx.float32)])
        self._exact.forget()
        ours = mx.concatenate([model.logits(row) for row in rows], axis=1)
        theirs = self._theirs.logits(ids, rows)
        yield _part("logits", exact, ours, theirs)
        chosen = self._theirs.logits(ids, tokens.answered(own))[0].argmax(axis=-1)
        self.chosen = np.array(chosen)

    def _layer(self, index: int, x: mx.array, own: mx.array) -> tuple[Part, mx.array, mx.array]:
        """Return a layer's part, its exact output for x ``[1, T, C]``, and mlx-lm's for its `own`
        input."""
        tokens = self._tokens
        ids, rows = tokens.parts(tokens.ids), tokens.parts(x)
        exact, experts = self._exact.layer(index, [tokens.ids], [x.astype(mx.float32)])
        self._exact.forget()
        theirs, their_experts = self._theirs.layer(index, ids, rows)
        own, _ = self._theirs.layer(index, ids, tokens.parts(own))
        self._theirs.forget()
        ours, our_experts, same = self._ours(index, rows)
        moved = [_moved(each, experts) for each in (our_experts, their_experts)]
        return _part(f"layer {index}", exact, ours, theirs, moved, same), exact, own

    def _ours(
        self, index: int, rows: list[mx.array]
    ) -> tuple[mx.array, mx.array | None, bool | None]:
        """Return a layer's output with all of its experts in memory, the ids of each token's
        experts, and whether the output has the same bits with few in memory."""
        model = self._model
        if index not in model.moe_blocks():
            return self._run(index, rows), None, None
        few = dict.fromkeys(model.store.layers, model.router.num_experts_per_tok)
        model.runtime.resize_banks(few)
        # A block that is recorded does not run as one operation.
        with model.record([index], ["ids"]) as kept:
            streamed = self._run(index, rows)
            experts = kept[index]["ids"]
            mx.eval(experts)
        model.runtime.resize_banks({**few, index: model.config.num_experts})
        ours = self._run(index, rows)
        model.runtime.resize_banks(few)
        return ours, experts, _bits(ours) == _bits(streamed)

    def _run(self, index: int, rows: list[mx.array]) -> mx.array:
        cache, found = self._model.make_cache()[index], []
        for row in rows:
            found.append(self._model.run_layer(index, row, cache))
            mx.eval(found[-1])
        return mx.concatenate(found, axis=1)


def _part(
    name: str,
    exact: mx.array,
    ours: mx.array,
    theirs: mx.array,
    moved: Sequence[np.ndarray | None] = (None, None),
    same_bits: bool | None = None,
) -> Part:
    """Return what was found. moved: ``[T]``, True for tokens that go to other experts."""
    worst, counts = [], [None if each is None else int(each.sum()) for each in moved]
    for array, elsewhere in zip((ours, theirs), moved, strict=True):
        errors = _errors(array, exact)
        kept = errors if elsewhere is None else errors[~elsewhere]
        worst.append(float(kept.max()) if kept.size else float("nan"))
    return Part(name, exact.shape[1], worst[0], worst[1], counts[0], counts[1], same_bits)


def _moved(experts: mx.array | None, exact: mx.array | None) -> np.ndarray | None:
    """Return ``[T]`` bool, True where ids ``[T, K]`` differ; None without experts."""
    if experts is None or exact is None:
        return None
    return (np.array(experts) != np.array(exact)).any(axis=1)


def _errors(found: mx.array, exact: mx.array) -> np.ndarray:
    """Return ``[T]``: the distance of ``[1, T, C]`` by the size of `exact`; NaN if it is not
    finite."""
    a, b = (np.array(each[0].astype(mx.float32)).astype(np.float64) for each in (found, exact))
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.sqrt(((a - b) ** 2).mean(-1) / (b**2).mean(-1))
    return np.where(np.isfinite(errors), errors, np.nan)


def _bits(array: mx.array) -> bytes:
    return np.array(array.astype(mx.float32)).tobytes()
