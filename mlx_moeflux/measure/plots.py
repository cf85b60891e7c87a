"""Pictures of a trace, large and colour-blind safe. Needs matplotlib (extra: ``plot``), no MLX."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.files import unwritable, write_output
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.experts.policies.eviction import DEFAULT_EVICTION, EVICTIONS
from mlx_moeflux.experts.telemetry.bounds import (
    coactivation,
    compulsory,
    popularity,
    reuse_distances,
    shuffled,
)
from mlx_moeflux.experts.telemetry.forecast import Profile, forecast
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.installation import install_command

# Okabe and Ito's colours; every line has a marker of its own besides.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
# End of the colours of pairs, in times of what popularity gives.
MOST_TOGETHER = 4.0
SIZE, DPI = (12.8, 7.2), 125
STYLE = {"font.size": 17, "lines.linewidth": 2.5, "lines.markersize": 9, "hatch.linewidth": 0.5}
STYLE |= {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}


def show(
    trace: Trace, out: str | os.PathLike[str], *, profile: Profile | None = None
) -> list[Path]:
    """Write every picture of `trace` into the directory `out` and return the files. A trace without
    decode steps has no picture of times, one of a single expert a token none of pairs.

    profile: Times of the machine; by default those that the trace's own clock gives.

    Raises:
        UnsupportedError: matplotlib is not installed. InputError: `out` cannot be written.
    """
    if not trace.calls:
        raise InputError("the trace is empty; record one that generates text.")
    out = Path(out)
    pictures: dict[str, Callable[[Any], None]] = {
        "hit-rate": lambda axes: draw_hit_rates(axes, trace),
        "popularity": lambda axes: draw_popularity(axes, trace),
        "reuse-distance": lambda axes: draw_reuse(axes, trace),
    }
    if trace.info.experts_per_token > 1:
        pictures["coactivation"] = lambda axes: draw_coactivation(axes, trace)
    times = profile or Profile.of_trace(trace)
    if times is not None:
        pictures["time"] = lambda axes: draw_times(axes, trace, times)
    files = []
    for name, draw in pictures.items():
        files.append(out / f"{name}.png")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise unwritable(out, cause) from cause
        write_output(files[-1], picture(draw))
    return files


def picture(*draws: Callable[[Any], None]) -> bytes:
    """Return a PNG in which each of `draws` has drawn into axes of its own, side by side.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    png = io.BytesIO()
    with _matplotlib().rc_context(STYLE):
        figure = _figure()
        for i, draw in enumerate(draws, 1):
            draw(figure.add_subplot(1, len(draws), i))
        figure.savefig(png, dpi=DPI, format="png")
    return png.getvalue()


def draw_hit_rates(axes: Any, trace: Trace) -> None:
    """Draw hit rate against budget: every policy, Belady's bound, and the limit that first uses
    set."""
    info = trace.info
    slots = sorted(
        {max(info.experts_per_token, round(share * info.num_experts)) for share in SHARES}
    )
    budgets = [100 * n / info.num_experts for n in slots]

    def rates(eviction: str) -> list[float]:
        runs = (simulate(trace, dict.fromkeys(info.layers, n), eviction=eviction) for n in slots)
        return [100 * run.hit_rate for run in runs]

    for i, name in enumerate(EVICTIONS):
        axes.plot(budgets, rates(name), color=COLOURS[i], marker=MARKERS[i], label=name)
    axes.plot(budgets, rates("belady"), "k--", label="best possible (Belady)")
    lookups = simulate(trace, dict.fromkeys(info.layers, info.num_experts)).total.lookups
    ceiling = 100 * (1 - compulsory(trace) / lookups)
    axes.axhline(ceiling, color="0.4", linestyle=":", label="first uses miss")
    axes.set(xlabel="budget, % of all experts", ylabel="hit rate, %", ylim=(0, 101))
    axes.set_title(f"Hit rate of eviction policies, {trace.tokens} tokens")
    axes.legend(loc="lower right")


def draw_popularity(axes: Any, trace: Trace) -> None:
    """Draw how often each layer's experts are chosen, the most popular first; 1: an equal share."""
    counts = np.stack([np.sort(row)[::-1] for row in popularity(trace).values()]).astype(float)
    share = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
    axes.grid(False)
    image = axes.imshow(
        share, aspect="auto", cmap="cividis", vmin=0, vmax=max(2.0, float(np.quantile(share, 0.99)))
    )
    layers = list(popularity(trace))
    step = max(1, len(layers) // 10)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set(xlabel="experts of a layer, the most popular first", ylabel="layer")
    axes.set_title("Popularity of experts")
    axes.figure.colorbar(image, ax=axes, label="times an equal share")


def draw_coactivation(axes: Any, trace: Trace) -> None:
    """Draw how often tokens choose two experts together, of the layer in which this departs most
    from chance; 1: as often as their popularity alone gives. Each expert is followed by the one, of
    those left, that is chosen with it most; experts that were never chosen are left out."""
    shares = {layer: _together(pairs) for layer, pairs in coactivation(trace).items()}
    layer = max(shares, key=lambda layer: float(np.nan_to_num(shares[layer]).var()))
    share = shares[layer]
    order = _neighbours(share, popularity(trace)[layer])
    axes.grid(False)
    image = axes.imshow(
        share[np.ix_(order, order)], aspect="auto", cmap="cividis", vmin=0, vmax=MOST_TOGETHER
    )
    ticks = range(0, len(order), max(1, len(order) // 16))
    names = [str(order[i]) for i in ticks]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.set(xlabel="expert", ylabel="expert")
    axes.set_title(f"Experts that a token chooses together, layer {layer}")
    label = "times what popularity gives"
    axes.figure.colorbar(image, ax=axes, label=label, extend="max")


def _together(pairs: np.ndarray) -> np.ndarray:
    """Return counts of pairs ``[E, E]`` over those that their experts' popularity gives; NaN on the
    diagonal and for experts that were never chosen."""
    others = ~np.eye(len(pairs), dtype=bool)
    single = np.diag(pairs).astype(float)
    expected = np.outer(single, single) * others
    expected *= (pairs * others).sum() / max(expected.sum(), 1.0)
    share = np.full(pairs.shape, np.nan)
    return np.divide(pairs, expected, out=share, where=expected > 0)


def _neighbours(share: np.ndarray, counts: np.ndarray) -> list[int]:
    """Return the experts that were chosen, the most popular first, each beside the one that is
    chosen with it most."""
    left = [int(e) for e in np.argsort(-counts, kind="stable") if counts[e]]
    order = left[:1]
    del left[:1]
    while left:
        order.append(max(left, key=lambda e: share[order[-1], e]))
        left.remove(order[-1])
    return order


def draw_reuse(axes: Any, trace: Trace) -> None:
    """Draw the share of uses that an LRU bank of so many slots would find, in order and with the
    tokens shuffled."""
    slots = np.arange(1, trace.info.num_experts + 1)
    kinds = (
        ("tokens in order", trace, COLOURS[0], "-"),
        ("shuffled", shuffled(trace), "0.3", "--"),
    )
    for label, source, colour, style in kinds:
        distances = reuse_distances(source)
        found = [100 * np.mean((distances >= 0) & (distances < n)) for n in slots]
        axes.plot(slots, found, color=colour, linestyle=style, linewidth=4, label=label)
    axes.plot(slots, 100 * slots / slots[-1], color="0.6", linestyle=":", label="no preference")
    axes.set(xlabel="slots of a layer", ylabel="uses found, %", ylim=(0, 101))
    axes.set_title("Reuse of experts: hits of an LRU bank")
    axes.legend(loc="lower right")


def draw_times(axes: Any, trace: Trace, profile: Profile) -> None:
    """Draw milliseconds of a decode step at several budgets; hidden reads stand apart."""
    ahead = "ahead" if any(call.guess for call in trace) else None
    least = trace.info.experts_per_token / trace.info.num_experts
    budgets = [f"{100 * share:g}%" for share in SHARES if share >= least]
    results = [
        forecast(trace, simulate(trace, budget, eviction=DEFAULT_EVICTION, prefetch=ahead), profile)
        for budget in budgets
    ]
    parts = (
        ("compute", "compute", COLOURS[0], ""),
        ("host", "host", COLOURS[5], "."),
        ("sync", "sync", COLOURS[4], "//"),
        ("demand reads", "demand", COLOURS[1], "\\\\"),
        ("reads ahead, waited for", "ahead", COLOURS[3], "xx"),
    )
    _stack(axes, budgets, results, parts)
    hidden = [1e3 * result.hidden for result in results]
    if any(hidden):
        places = np.arange(len(budgets)) + 0.38
        axes.bar(places, hidden, width=0.15, color="0.8", hatch="..", label="reads hidden")
    axes.set(xlabel="budget, % of all experts", ylabel="milliseconds")
    axes.set_title("Forecast time of a token")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.legend(loc="upper center", ncols=3)


def _stack(axes: Any, names: Sequence[str], results: Sequence[Any], parts: Sequence[Any]) -> None:
    bottom = np.zeros(len(names))
    for label, field, colour, hatch in parts:
        height = np.array([1e3 * getattr(result, field) for result in results])
        if height.any():
            axes.bar(names, height, 0.6, bottom, color=colour, hatch=hatch, label=label)
        bottom += height


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError(
            f"pictures need matplotlib; install it with {install_command('mlx_moeflux[plot]')}."
        ) from None
    return matplotlib


def _figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=SIZE, layout="constrained")
