"""A server whose experts are on several ranks: rank 0 answers requests, the others repeat what its
batch does. Their sampled tokens are rank 0's, so they need neither samplers nor grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.distributed.heartbeat import leave
from mlx_moeflux.distributed.ranks import Ranks
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.generation.batch import BatchGenerator, BatchReply
from mlx_moeflux.models.protocol import LoadedModel


class LeadingGenerator(BatchGenerator):
    """The batch of rank 0, which tells each call to the others before it makes it.

    A call that fails within a step ends all ranks: the others cannot take it back.
    """

    def __init__(self, model: LoadedModel, *, prompt_cache: PromptCache | None, **options: Any):
        self._ranks = _ranks_of(model)
        options["stop_ids"] = sorted(options["stop_ids"])
        self._send("open", **options)
        super().__init__(model, prompt_cache=prompt_cache, **options)

    def insert(
        self, prompts: Sequence[Sequence[int]], max_tokens: Any = None, **options: Any
    ) -> list[int]:
        """See :meth:`BatchGenerator.insert`; without ``caches``."""
        breakpoints = options.get("breakpoints")
        known = None if breakpoints is None else [list(map(int, b or ())) for b in breakpoints]
        rows = [list(map(int, prompt)) for prompt in prompts]
        self._send("insert", prompts=rows, max_tokens=max_tokens, breakpoints=known)
        return super().insert(prompts, max_tokens, **options)

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """See :meth:`BatchGenerator.remove`."""
        uids = list(uids)
        self._send("remove", uids=uids)
        return super().remove(uids, return_prompt_caches)

    def forget(self) -> None:
        """See :meth:`BatchGenerator.forget`."""
        self._send("forget")
        super().forget()

    def step(self) -> list[BatchReply]:
        """See :meth:`BatchGenerator.step`."""
        self._send("step")
        try:
            return super().step()
        except BaseException as error:  # noqa: BLE001  # of any kind: the ranks end
            self._ranks.fail(error)
            leave(f"a step failed on rank 0: {error}")

    def warm_up(self, prompt_tokens: int = 32, *, most: int | None = None, **_: Any) -> None:
        """See :meth:`BatchGenerator.warm_up`; without ``go_on``, which ranks would hear of at
        different steps."""
        self._send("warm_up", prompt_tokens=prompt_tokens, most=most)
        super().warm_up(prompt_tokens, most=most)

    def close(self) -> None:
        """See :meth:`BatchGenerator.close`."""
        self._send("close")
        super().close()

    def _send(self, call: str, **options: Any) -> None:
        self._ranks.send(json.dumps([call, options]))


def _ranks_of(model: LoadedModel) -> Ranks:
    """Return the ranks of a model whose experts are on several."""
    return cast("Ranks", model.store.ranks)


def follow(model: LoadedModel, prompt_cache: PromptCache | None) -> None:
    """Repeat what the :class:`LeadingGenerator` of rank 0 does, until rank 0 ends."""
    ranks = _ranks_of(model)
    generator: Any = None
    with ranks.reporting():
        while (text := ranks.receive()) is not None:
            call, options = json.loads(text)
            if call == "open":
                generator = BatchGenerator(model, prompt_cache=prompt_cache, **options)
                continue
            method: Callable[..., Any] = getattr(generator, call)
            try:
                method(**options)
            except MoefluxError:
                # Rank 0 refuses the same prompt, and tells its client.
                if call != "insert":
                    raise
