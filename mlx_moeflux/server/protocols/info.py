"""What a server says of itself: models, health, metrics, properties."""

from __future__ import annotations

from typing import Any

from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.service import Service


def model(service: Service) -> dict[str, Any]:
    """Return OpenAI's description of the one model."""
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.created,
        "owned_by": "mlx_moeflux",
        "context_length": service.model.context_left(),
    }


def models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [model(service)]}


def retrieve(service: Service, name: str) -> dict[str, Any]:
    """Return the model under its name, or under any if the server is not strict."""
    service.check_model(name)
    return model(service)


def health(service: Service) -> dict[str, Any]:
    """Return the state of a server that answers.

    Raises:
        RequestError: It does not, or no longer.
    """
    if not service.ready:
        raise RequestError("the server is not ready.", status=503)
    return {"status": "ok"}


def metrics(service: Service) -> str:
    """Return all counts in Prometheus' text format."""
    total = service.model.store.stats().total
    cache = service.prompt_cache
    return service.metrics.text(
        {
            "replies": ("gauge", "Replies that wait or run.", service.engine.live),
            "expert_lookups_total": ("counter", "Experts looked up.", total.lookups),
            "expert_hits_total": ("counter", "Experts found in memory.", total.hits),
            "expert_hit_rate": ("gauge", "Hits by lookups since the start.", total.hit_rate),
            "expert_bytes_read_total": ("counter", "Bytes of experts read.", total.bytes_read),
            "expert_stall_seconds_total": (
                "counter",
                "Seconds of waiting for reads of experts.",
                total.stall_seconds,
            ),
            "prompt_cache_bytes": (
                "gauge",
                "Bytes of stored states in memory.",
                cache.nbytes if cache else 0,
            ),
            "prompt_cache_states": ("gauge", "Stored states.", len(cache) if cache else 0),
        }
    )
