"""The speed to expect of a streamed model, printed at the first run from a disk."""

from __future__ import annotations

from pathlib import Path

from mlx_moeflux.experts.io.readers import PAGE_CACHED
from mlx_moeflux.experts.system_memory import available_memory
from mlx_moeflux.measure.disk import kept_speed
from mlx_moeflux.measure.plan import Sizes, span, speeds
from mlx_moeflux.measure.rates import chip_bandwidth, find_rates
from mlx_moeflux.models.protocol import LoadedModel, named_parameters

# Smaller models are read from the page cache after a moment.
LEAST_EXPERT_BYTES = 10**9


def first_run_hint(model: LoadedModel) -> str:
    """Return a line with the expected speed of a loaded model; measure the disk for it.

    It is empty unless the model is streamed from files by a machine whose memory's bandwidth is
    known, and if the speed of their disk was measured before.
    """
    streaming, plan = model.store.streaming, model.plan
    files = getattr(getattr(streaming, "reader", None), "files", ())
    if streaming is None or plan is None or not files:
        return ""
    if plan.expert_bytes < LEAST_EXPERT_BYTES or chip_bandwidth() is None:
        return ""
    place = Path(files[0])
    if kept_speed(place) is not None:
        return ""
    rates, sizes = find_rates(place), loaded_sizes(model)
    # Trunk and bank are allocated already, the state is not.
    cached = streaming.reader.name in PAGE_CACHED
    left = available_memory()[0] - sizes.state_bytes if cached else 0
    slow, fast, _ = speeds(
        sizes,
        min(plan.slots.values()),
        resident=False,
        ssd_gbps=rates.ssd_gbps,
        memory_gbps=rates.memory_gbps,
        page_cache_bytes=max(0, left),
    )
    return (
        f"expected {span(slow, fast)} tokens per second: {rates}; "
        "'mlx_moeflux plan MODEL' shows the arithmetic"
    )


def loaded_sizes(model: LoadedModel) -> Sizes:
    """Return the sizes of a loaded model."""
    config, plan = model.config, model.plan
    assert plan is not None  # its store is this package's
    embedding = sum(a.nbytes for name, a in named_parameters(model) if ".embed_tokens." in name)
    block: int = plan.expert_bytes // (len(plan.slots) * config.num_experts)
    return Sizes(
        model_type=config.published()["model_type"],
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        blocks=dict.fromkeys(plan.slots, block),
        trunk_bytes=plan.trunk_bytes,
        embedding_bytes=0 if config.tie_word_embeddings else embedding,
        state_bytes=config.state_bytes(8192),
        context=8192,
        hidden_size=config.hidden_size,
    )
