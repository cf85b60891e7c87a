"""Compare the quality of lossy options with the exact model on the same fixed prompts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import InputError
from mlx_moeflux.generation.text import generate
from mlx_moeflux.models.decoder import DecoderModel

PROMPTS = Path(__file__).parents[1] / "data" / "evaluation" / "prompts.json"

Opener = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class Comparison:
    """Exact against lossy.

    positions: Predictions compared.
    perplexity, lossy_perplexity: Of the texts.
    divergence: Mean Kullback-Leibler divergence of the lossy prediction from the exact one, in
        nats.
    agreement: Share of positions with the same likeliest token.
    json_valid, lossy_json_valid: Share of the JSON prompts whose greedy reply parses.
    lossy: What the lossy model's statistics admit.
    """

    positions: int
    perplexity: float
    lossy_perplexity: float
    divergence: float
    agreement: float
    json_valid: float
    lossy_json_valid: float
    lossy: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = 100 * (self.lossy_perplexity / self.perplexity - 1)
        rows = [
            ("", "exact", "lossy", ""),
            (
                "perplexity",
                f"{self.perplexity:.3f}",
                f"{self.lossy_perplexity:.3f}",
                f"{ratio:+.1f} %, {self.positions} positions",
            ),
            ("divergence", "", f"{self.divergence:.4f}", "nats a token"),
            ("same first choice", "", f"{100 * self.agreement:.1f} %", ""),
            (
                "valid JSON",
                f"{100 * self.json_valid:.0f} %",
                f"{100 * self.lossy_json_valid:.0f} %",
                "",
            ),
        ]
        lines = [f"{a:18}{b:>10}{c:>10}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join([*lines, *(f"lossy: {what}" for what in self.lossy)])


def compare(
    exact: Opener,
    lossy: Opener,
    *,
    texts: Sequence[str] | None = None,
    prompts: Sequence[dict[str, str]] | None = None,
    max_tokens: int = 120,
) -> Comparison:
    """Open the exact model, then the lossy one, never both, and compare their predictions.

    Args:
        exact, lossy: Functions that give a model and its tokenizer.
        texts: To predict, token by token; the package's own by default.
        prompts: Each with a `prefix` of JSON to continue and an `ask` for models with a chat
            template. max_tokens: Of each reply.

    Evaluates: everything; the exact predictions wait on disk, 4 V bytes a position.

    Raises:
        InputError: The two have different vocabularies, or there is nothing to compare.
    """
    fixed = json.loads(PROMPTS.read_text(encoding="utf-8"))
    texts = fixed["texts"] if texts is None else texts
    questions = fixed["json"] if prompts is None else prompts
    if not texts:
        raise InputError("there are no texts to compare on; give at least one.")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npy" for i in range(len(texts))]
        with _opened(exact) as (model, tokenizer):
            ids = [tokenizer.encode(text) for text in texts]
            for file, each in zip(files, ids, strict=True):
                np.save(file, _log_probabilities(model, each))
            valid = _valid_share(model, tokenizer, questions, max_tokens)
        losses, lossy_losses, divergences, same = [], [], [], []
        with _opened(lossy) as (model, tokenizer):
            if ids != [tokenizer.encode(text) for text in texts]:
                raise InputError("the models have different tokenizers; compare copies of one.")
            for file, each in zip(files, ids, strict=True):
                p, q = np.load(file), _log_probabilities(model, each)
                if p.shape != q.shape:
                    raise InputError(
                        f"the models predict {p.shape[1]} and {q.shape[1]} tokens; they must have "
                        "one vocabulary."
                    )
                rows, following = np.arange(len(p)), np.array(each[1:])
                losses.append(-p[rows, following])
                lossy_losses.append(-q[rows, following])
                divergences.append((np.exp(p) * (p - q)).sum(axis=1))
                same.append(p.argmax(axis=1) == q.argmax(axis=1))
            lossy_valid = _valid_share(model, tokenizer, questions, max_tokens)
            marks = tuple(model.store.stats().lossy)
    return Comparison(
        positions=sum(len(row) for row in losses),
        perplexity=float(np.exp(np.concatenate(losses).mean())),
        lossy_perplexity=float(np.exp(np.concatenate(lossy_losses).mean())),
        divergence=float(np.concatenate(divergences).mean()),
        agreement=float(np.concatenate(same).mean()),
        json_valid=valid,
        lossy_json_valid=lossy_valid,
        lossy=marks,
    )


def is_json(text: str) -> bool:
    """Return True if `text` begins with a complete JSON value in braces or brackets; a fence and
    blanks may precede it."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    if not starts or text[: min(starts)].strip().removeprefix("```json").strip("`\n "):
        return False
    try:
        json.JSONDecoder().raw_decode(text[min(starts) :])
    except ValueError:
        return False
    return True


@contextmanager
def _opened(opener: Opener) -> Iterator[tuple[Any, Any]]:
    model, tokenizer = opener()
    with model:
        yield model, tokenizer


def _log_probabilities(model: DecoderModel, ids: list[int]) -> np.ndarray:
    """``[T - 1, V]`` float32: the prediction of each token but the first."""
    if len(ids) < 2:
        raise InputError("a text to compare on has fewer than two tokens; give a longer one.")
    logits = model(mx.array(ids[:-1])[None])[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _valid_share(
    model: DecoderModel, tokenizer: Any, prompts: Sequence[dict[str, str]], max_tokens: int
) -> float:
    """The share of `prompts` to which the greedy reply is JSON; nan without prompts."""
    valid = []
    for prompt in prompts:
        if tokenizer.chat_template is None:
            text = prompt["prefix"]
            reply = text + generate(model, tokenizer, text, max_tokens=max_tokens)
        else:
            messages = [{"role": "user", "content": prompt["ask"]}]
            reply = generate(model, tokenizer, messages, max_tokens=max_tokens)
        valid.append(is_json(reply))
    return float(np.mean(valid)) if valid else float("nan")
