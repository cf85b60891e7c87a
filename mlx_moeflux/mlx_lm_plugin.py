"""Run our models in mlx-lm's programs (server, evaluate, generate, chat ...).

``mlx_lm.stream_generate`` and ``mlx_lm.batch_generate`` take a model from ``mlx_moeflux.load``
directly. Programs that load a model by path, and files of ``save_prompt_cache``, need one call
first:

    from mlx_moeflux.mlx_lm_plugin import register_with_mlx_lm
    register_with_mlx_lm(expert_memory="50%")
    mlx_lm.server.main()
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from mlx_moeflux.cache import AttentionCache, LatentCache, RecurrentCache
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import CacheError, UnsupportedError
from mlx_moeflux.experts.streaming.warm_up import warm_up


def register_with_mlx_lm(**load_options: Any) -> None:
    """Make mlx-lm in this process load our architectures through our loader.

    load_options: Passed to ``mlx_moeflux.load_model``; a second call replaces them. mlx-lm still
    loads other architectures, sharded models and the tokenizer.

    Raises:
        UnsupportedError: mlx-lm is not installed.
    """
    register_cache_classes()
    from mlx_lm import utils

    from mlx_moeflux.loading import load_model as load_ours
    from mlx_moeflux.models import MODEL_TYPES

    # load() looks load_model up in its module at every call, so replacing that name reaches
    # programs that have imported load already.
    stock = getattr(utils.load_model, "stock", utils.load_model)

    def load_model(
        model_path: Path,
        lazy: bool = False,
        strict: bool = True,
        model_config: dict[str, Any] | None = None,
        **options: Any,
    ):
        config = utils.load_config(model_path)
        if config.get("model_type") not in MODEL_TYPES or not strict:
            return stock(model_path, lazy, strict, model_config, **options)
        if model_config:
            raise UnsupportedError(
                f"{model_path}: {', '.join(model_config)} cannot be overridden here; edit "
                "config.json instead."
            )
        return load_ours(model_path, **load_options), config

    load_model.stock = stock
    utils.load_model = load_model


def register_cache_classes() -> None:
    """Add our cache entries to the module where ``load_prompt_cache`` looks classes up.

    Raises:
        UnsupportedError: mlx-lm is not installed.
    """
    try:
        from mlx_lm.models import cache
    except ImportError as error:
        raise UnsupportedError("mlx-lm is not installed here; pip install mlx-lm.") from error
    for entry in (AttentionCache, LatentCache, RecurrentCache):
        setattr(cache, entry.__name__, entry)


class SharedPrompts:
    """Our :class:`~mlx_moeflux.cache.prompt.cache.PromptCache` with the interface of mlx-lm's
    ``LRUPromptCache``.

    provider: Its ``model`` is the one whose states are kept; mlx-lm's model keys are ignored.
    """

    def __init__(self, provider: Any, cache: PromptCache):
        self._provider, self._cache = provider, cache

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Return the state after the longest cached prefix, or None, and the remaining tokens: at
        least one, since mlx-lm takes no logits."""
        resumed = self._cache.resume(self._provider.model, tokens)
        if resumed.position == len(tokens):
            resumed = self._cache.resume(self._provider.model, tokens[:-1])
        warm_up(self._provider.model.store, resumed.experts)
        if resumed.position == 0:
            return None, tokens
        return resumed.state, tokens[resumed.position :]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = ""
    ) -> None:
        """Store the state after `tokens`."""
        # The state of a reply that was cut off may be a token ahead; it is not stored.
        with contextlib.suppress(CacheError):
            self._cache.store(self._provider.model, tokens, prompt_cache)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Do nothing: the cache has its own limits."""

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return no statistics: there is one type."""
        return {}
