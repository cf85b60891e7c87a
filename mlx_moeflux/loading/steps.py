"""Load a model in steps: open, map, build, place, fill, finish."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_moeflux.backend import set_device_variables, use_mlx
from mlx_moeflux.checkpoint.hub import resolve
from mlx_moeflux.checkpoint.names import MappedTensors
from mlx_moeflux.checkpoint.source import Checkpoint, open_checkpoint
from mlx_moeflux.checkpoint.tensors import Blocks
from mlx_moeflux.distributed.part import Experts, Part
from mlx_moeflux.distributed.placement import make_places
from mlx_moeflux.distributed.ranks import reporting
from mlx_moeflux.errors import ConfigError, InputError, MoefluxError
from mlx_moeflux.experts.budget import (
    Memory,
    format_bytes,
    measure_memory,
)
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.samples import check_replica, check_scales, experts_identity
from mlx_moeflux.experts.policies.eviction import make_eviction
from mlx_moeflux.experts.policies.named import NONE
from mlx_moeflux.experts.policies.prefetch import AutoLookAhead, make_prefetch
from mlx_moeflux.experts.streaming.store import DEFAULT_THREADS, check_threads
from mlx_moeflux.experts.telemetry.forecast import open_tuning
from mlx_moeflux.generation.drafting import OFF, draws_on_heads, make_drafting
from mlx_moeflux.generation.head_drafts import HeadDrafts
from mlx_moeflux.generation.memory import parse_wired_memory
from mlx_moeflux.kernels.registry import Kernels, choose_kernels
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading.heads import OpenedHead, open_head, without_head
from mlx_moeflux.loading.options import (
    LoadArguments,
    LoadModelArguments,
    LoadOptions,
    check_arguments,
    takes,
)
from mlx_moeflux.loading.stores import (
    bytes_to_decode,
    check_store,
    make_store,
    trunk_bytes_to_decode,
)
from mlx_moeflux.loading.values import STOCK
from mlx_moeflux.models import check_kind, model_class, read_config
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.moe import Router, check_router
from mlx_moeflux.models.weights import (
    check_experts,
    compare_with_config,
    default_dtype,
    expert_specs,
    fill_trunk,
)
from mlx_moeflux.tokenizer import Tokenizer, load_tokenizer


@takes(LoadArguments)
def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[DecoderModel, Tokenizer]:
    """Load a checkpoint: a directory, a GGUF file, or a Hugging Face id such as ``org/name`` or
    ``org/name:Q4_K_M``.

    options: Those of :class:`~mlx_moeflux.loading.options.LoadOptions`. tokenizer_config: Overrides
    tokenizer_config.json.

    Raises:
        MoefluxError: One of its kinds, in one sentence; see :mod:`mlx_moeflux.errors`.
    """
    named = {"revision": revision, "tokenizer_config": tokenizer_config}
    check_arguments("load", LoadArguments, {"path_or_hub_id": path_or_hub_id, **named, **options})
    use_mlx()
    distributed = options.get("distributed")
    _prepare_gpu(distributed)  # before ranks meet
    with reporting(distributed) as ranks:
        gguf_file = options.pop("gguf_file", None)
        path = resolve(path_or_hub_id, revision=revision, gguf_file=gguf_file)
        check_kind(path)
        tokenizer = load_tokenizer(path, **dict(tokenizer_config or {}))
        return load_model(path, **{**options, "distributed": ranks}), tokenizer


@takes(LoadModelArguments)
def load_model(path: str | os.PathLike[str], **options: Any) -> DecoderModel:
    """Load a checkpoint directory or GGUF file without its tokenizer; everything is evaluated.

    The first call sets the environment variables of
    :func:`~mlx_moeflux.backend.set_device_variables`. No call changes the state of ``mx.random``.

    options: Those of :class:`~mlx_moeflux.loading.options.LoadOptions`.

    Raises:
        MoefluxError: One of its kinds, in one sentence.
    """
    options = check_arguments("load_model", LoadModelArguments, {"path": path, **options})
    path = options.pop("path")
    use_mlx()
    distributed = options.get("distributed")
    _prepare_gpu(distributed)
    # Ranks meet before a model uses their GPUs.
    with reporting(distributed) as ranks, _same_random_state():
        return _load(path, LoadOptions(**{**options, "distributed": ranks}))


def _prepare_gpu(distributed: Any) -> None:
    """Do what must come before MLX's first use of a GPU in this process: set the variables that it
    reads then, and link the directory where it looks for compiled kernels.

    The second uses the GPU, to try whether MLX takes a kernel from there.
    """
    set_device_variables(ranks=bool(distributed))
    device.open_files()


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Restore MLX's random state: building layers draws initial weights, which no caller sees."""
    high, low = mx.random.state[0].tolist()  # pyright: ignore[reportIndexIssue]  # it is a list
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint, and what stands beside its weights.

    path: As it was given. options: With those of a tuning file. kind: The class of the model.
    """

    path: str | os.PathLike[str]
    options: LoadOptions
    checkpoint: Checkpoint
    kind: Any
    config: Any
    kernels: Kernels
    router: Router


@dataclasses.dataclass(frozen=True)
class Weights:
    """The model's weights, by its names for them, and the checkpoints that hold its experts.

    stored: The checkpoint that has the experts. places: Path -> it and its experts, and those of
    each copy.
    """

    mapped: MappedTensors
    stored: Checkpoint
    places: Mapping[str, tuple[Checkpoint, Experts]]


@dataclasses.dataclass(frozen=True)
class Placed:
    """The experts of this process.

    part: This rank's; None: one process has all. mapped: With its experts alone. places: Path ->
    the same experts there. identified: What the identity of the experts is made of, equal on all
    ranks.
    """

    part: Part | None
    mapped: MappedTensors
    places: Mapping[str, Experts]
    identified: Experts


def _load(path: str | os.PathLike[str], options: LoadOptions) -> DecoderModel:
    """Take the steps; each returns what later ones need."""
    options, memory = _checked(options), measure_memory()
    source = _open(path, options)
    weights = _map(source)
    model, layouts = _build(source, weights)
    placed = _place(source, weights, layouts)
    _fill(model, layouts, source, weights, placed, memory)
    _finish(model, source, placed)
    return model


def _checked(options: LoadOptions) -> LoadOptions:
    """Return `options` with what follows from them alone; no file is touched.

    Raises:
        InputError: Options exclude each other.
    """
    kernels, prefetch, fuse = options.kernels, options.prefetch, options.fuse
    if options.safe:
        others = options.prompt_kernels == STOCK or prefetch not in (None, NONE)
        if kernels not in (None, "reference") or others:
            raise InputError("safe excludes kernels, prompt_kernels and prefetch; leave them out.")
        kernels, prefetch, fuse = "reference", NONE, False
    if options.distributed is not None and options.drafts != OFF:
        raise InputError(
            "drafts are for one process: ranks would draft differently; leave them out."
        )
    if options.distributed is not None and options.prompt_kernels == STOCK:
        raise InputError(
            "prompt_kernels is for one process: ranks compute pair by pair; leave it out."
        )
    own = options.reader is not None or options.store is not None
    if own and len(_expert_paths(options)) > 1:
        raise InputError("a reader or store of your own reads one place; give one expert_path.")
    if options.mtp_path is not None and not draws_on_heads(options.drafts):
        raise InputError("mtp_path has a head for drafts; give drafts 'mtp' or 'auto' too.")
    head = options.mtp_path is not None or options.drafts == HeadDrafts.name
    if head and options.store is not None:
        raise InputError("a store of your own has no experts of a head; leave out drafts of 'mtp'.")
    return dataclasses.replace(
        options,
        kernels=kernels,
        prefetch=prefetch,
        fuse=fuse,
        eviction=make_eviction(options.eviction),
    )


def _expert_paths(options: LoadOptions) -> list[str]:
    """Return the places of `expert_path`, of this rank; empty if there is none.

    Raises:
        InputError: One stands there twice.
    """
    given = options.expert_path
    if given is None:
        return []
    places = [given] if isinstance(given, str | os.PathLike) else given
    rank = 0 if options.distributed is None else options.distributed.rank
    found = [os.fspath(place).replace("{rank}", str(rank)) for place in places]
    real = [os.path.realpath(place) for place in found]
    for i, place in enumerate(found):
        if real[i] in real[:i]:
            raise InputError(f"expert_path has {place} twice; leave one out.")
    return found


def _open(path: str | os.PathLike[str], options: LoadOptions) -> Source:
    """Read headers and config; choose kernels and router. No weights are read."""
    checkpoint = open_checkpoint(
        path,
        gguf_file=options.gguf_file,
        requantize=options.requantize,
        trunk_blocks=device.kind() != "cpu",
        strict=options.strict_config,
    )
    options = _tuned(options, checkpoint, path)
    config = read_config(checkpoint, strict=options.strict_config)
    kind = model_class(checkpoint.config["model_type"])
    kernels = options.kernels
    if not isinstance(kernels, Kernels):
        kernels = choose_kernels(kernels, check_values=options.check_values)
    kernels.measure_nothing(options.distributed is not None)
    kernels.take_stock_for_prompts(options.prompt_kernels == STOCK)
    router = _router(kind, config, kernels, options)
    return Source(path, options, checkpoint, kind, config, kernels, router)


def _tuned(
    options: LoadOptions, checkpoint: Checkpoint, path: str | os.PathLike[str]
) -> LoadOptions:
    """Return `options`, with those of the tuning file in place of defaults.

    Raises:
        InputError: The file is none of this model, or a value cannot be used.
    """
    if options.tuning is not None:
        tuned = open_tuning(options.tuning)
        if tuned.pop("model") != checkpoint.identity():
            raise InputError(
                f"{options.tuning} was written for another model than {path}; tune this one."
            )
        for name, value in tuned.items():
            if getattr(options, name) in (None, getattr(LoadOptions, name)):
                options = dataclasses.replace(options, **{name: value})
    if options.expert_threads is not None:
        check_threads(options.expert_threads)
    prefetch = options.prefetch
    # A prefetcher would exclude the handshake, and a CPU computes while it could look ahead.
    if prefetch is None and device.kind() == "metal" and not options.handshake:
        prefetch = AutoLookAhead.name
    return dataclasses.replace(options, prefetch=make_prefetch(prefetch))


def _router(kind: Any, config: Any, kernels: Kernels, options: LoadOptions) -> Router:
    """Return the given router, or the model's.

    Raises:
        InputError: experts_per_token is out of range, or there is a router too.
    """
    fewer, own = options.experts_per_token, config.num_experts_per_tok
    if fewer is not None and not 1 <= fewer <= own:
        raise InputError(f"experts_per_token is {fewer}; this model allows 1 to {own}.")
    if options.router is None:
        return kind.make_router(config, kernels, experts_per_token=fewer)
    if fewer is not None:
        raise InputError("give either a router or experts_per_token: a router has its own K.")
    return options.router


def _map(source: Source) -> Weights:
    """Give every tensor the model's name. The experts may lie in another checkpoint.

    Raises:
        CheckpointError: Two tensors claim one name, an expert is missing from a layer, or the
            experts of a further place are no copy of the first's.
    """
    checkpoint, options, rules = source.checkpoint, source.options, source.config.name_rules()
    mapped, stored = checkpoint.mapped(rules), checkpoint
    places: dict[str, tuple[Checkpoint, Experts]] = {}
    for path in _expert_paths(options):
        found = open_checkpoint(path, requantize=options.requantize, strict=options.strict_config)
        experts = found.mapped(rules).experts
        if places:
            check_replica(mapped.experts, experts, place=path)
        else:
            mapped, stored = dataclasses.replace(mapped, experts=experts), found
        places[path] = found, experts
    places = places or {os.fspath(source.path): (stored, mapped.experts)}
    return Weights(mapped, stored, places)


def _build(source: Source, weights: Weights) -> tuple[DecoderModel, dict[int, BlockLayout]]:
    """Return the model, whose parameters are still those of its initialisation, and the layout of
    each layer's expert blocks.

    Raises:
        ConfigError: A size is no array's.
        CheckpointError: The experts do not fit the config.
        MoefluxError: The given router is wrong, see :func:`~mlx_moeflux.models.moe.check_router`.
    """
    try:
        model = source.kind(source.config, router=source.router, kernels=source.kernels)
    except MoefluxError:
        raise
    # MLX raises one of these, by how far a dimension is out of range.
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{source.checkpoint.config_file}: its sizes multiply to 0 or to more than an array "
            "can have; config.json and the weights are of different models."
        ) from error
    stored = weights.stored
    layouts = check_experts(model, weights.mapped, directory=stored.directory, of=stored.of)
    check_scales(stored.blocks)
    if source.options.router is not None:
        check_router(source.router, source.config.num_experts, layouts)
    return model, layouts


def _place(source: Source, weights: Weights, layouts: dict[int, BlockLayout]) -> Placed:
    """Choose the experts of this process: all, or those of this rank.

    Raises:
        InputError: Options are for several ranks, or exclude them; the checkpoint has the experts
            of another rank.
    """
    options, mapped, stored = source.options, weights.mapped, weights.stored
    if options.distributed is None:
        if options.exact_prompts or options.placement != LoadOptions.placement:
            raise InputError(
                "placement and exact_prompts are for several ranks; give distributed too."
            )
        if stored.held:
            raise InputError(
                f"{stored.directory} has one rank's experts; load with distributed, or take the "
                "whole checkpoint."
            )
        places = {path: experts for path, (_, experts) in weights.places.items()}
        return Placed(None, mapped, places, mapped.experts)
    if options.store is not None or options.reader is not None:
        raise InputError("distributed excludes a store or a reader; leave them out.")
    ranks, E = options.distributed, source.config.num_experts
    part = Part(ranks, make_places(options.placement, sorted(layouts), E, ranks.size))
    identified = part.identified(mapped.experts, stored)
    places = {path: part.held(there, of) for path, (of, there) in weights.places.items()}
    held = dataclasses.replace(mapped, experts=next(iter(places.values())))
    return Placed(part, held, places, identified)


def _fill(
    model: DecoderModel,
    layouts: dict[int, BlockLayout],
    source: Source,
    weights: Weights,
    placed: Placed,
    memory: Memory,
) -> None:
    """Read the trunk, set what the model keeps of the options, and give it a store of experts.

    memory: That of the machine before anything was read.

    Raises:
        CheckpointError: A tensor is missing, does not fit or cannot be read.
        InputError: An option is out of this model's range.
        MemoryBudgetError: The experts' memory is too small or too large.
    """
    checkpoint, options = source.checkpoint, source.options
    dtype, stored = options.dtype or default_dtype(), weights.stored
    specs = fill_trunk(model, placed.mapped, directory=checkpoint.directory, dtype=dtype)
    if stored is not checkpoint:
        compare_with_config(checkpoint, source.config.name_rules(), specs)
        specs = {}
    compare_with_config(stored, source.config.name_rules(), {**specs, **expert_specs(layouts)})
    model.states.set_context_limit(options.max_context)
    model.runtime.wired_memory = parse_wired_memory(options.wired_memory)
    model.identity = checkpoint.identity()
    model.experts_identity = partial(experts_identity, placed.identified)
    if options.kv_bits is not None:
        model.quantize_cache(options.kv_bits, options.kv_group_size)
    model.open_tables(
        placed.mapped.tables,
        file=checkpoint.config_file,
        memory=options.row_memory,
        threads=options.expert_threads or DEFAULT_THREADS,
    )
    store = options.store
    if store is None:
        of_experts = bytes_to_decode(
            layouts.values(),
            source.kernels.expert_mix,
            experts_per_token=source.router.num_experts_per_tok,
            most_tokens=model.prefill_chunk,
        )
        of_trunk = trunk_bytes_to_decode(model, source.kernels.project, dtype)
        model.runtime.decoding_bytes = max(of_experts, of_trunk)
        head = _open_head(model, source, placed, dtype)
        if head is not None:
            model.set_prediction(head.head)
        store, model.runtime.plan = make_store(
            *(model, placed.mapped, layouts, options),
            part=placed.part,
            places=placed.places,
            memory=memory,
            head=head,
        )
        store.stats().mark_lossy_later(source.kernels.unpromised)
        if options.verbose:
            _print_plan(model, source, placed)
        if placed.part is not None:
            store = placed.part.store(store, options.exact_prompts)
            store.events = options.events
    else:
        check_store(store, model, layouts, dtype)
    model.set_store(store)


def _open_head(
    model: DecoderModel, source: Source, placed: Placed, dtype: mx.Dtype
) -> OpenedHead | None:
    """Read the head of multi-token prediction that `drafts` or `mtp_path` names, or one that the
    checkpoint has or lies beside it, if `drafts` may draw on it; None: neither. Warns if the
    checkpoint was published with one."""
    options, checkpoint = source.options, source.checkpoint
    if options.drafts != HeadDrafts.name and options.mtp_path is None:
        if not draws_on_heads(options.drafts):
            return None
        if source.config.prediction() is None or not checkpoint.prediction(placed.mapped):
            if why := without_head(checkpoint, source.config):
                place = checkpoint.directory
                warnings.warn(f"drafts of {place} come without its head: {why}.", stacklevel=2)
            return None
    return open_head(
        model,
        source.checkpoint,
        placed.mapped,
        path=options.mtp_path,
        reader=options.expert_reader,
        dtype=dtype,
    )


def _finish(model: DecoderModel, source: Source, placed: Placed) -> None:
    """Note what makes results differ from the full model's, join projections, and compare with
    the other ranks.

    Raises:
        DistributedError: The ranks differ.
    """
    options, stats = source.options, model.store.stats()
    own, chosen = source.config.num_experts_per_tok, source.router.num_experts_per_tok
    model.drafting = make_drafting(options.drafts, model)
    if options.safe:
        model.compile_steps = False
    if source.checkpoint.approximated:
        stats.mark_lossy(source.checkpoint.approximated)
    if chosen < own:
        stats.mark_lossy(f"experts_per_token {chosen} of {own}")
    if options.kv_bits is not None:
        stats.mark_lossy(f"kv_bits {options.kv_bits}")
    if options.prompt_kernels == STOCK:
        stats.mark_lossy("prompt_kernels stock: not the same bits at every memory for experts")
    if options.fuse or (options.fuse is None and device.kind() != "cpu"):
        model.prepare()
        if model.prediction is not None:
            model.prediction.body.prepare()
    if placed.part is not None:
        placed.part.agree(model, exact_prompts=options.exact_prompts)


def _print_plan(model: DecoderModel, source: Source, placed: Placed) -> None:
    """Print the line of the plan on stderr, and what a user may want to mend."""
    part, checkpoint = placed.part, source.checkpoint
    whose = "" if part is None else f"rank {part.ranks.rank} of {part.ranks.size}: "
    print(f"{whose}{model.plan}", file=sys.stderr)  # noqa: T201
    if checkpoint.approximated:
        print(checkpoint.approximated, file=sys.stderr)  # noqa: T201
    for line in _decoded(checkpoint.decoded, source.options.dtype or default_dtype()):
        print(line, file=sys.stderr)  # noqa: T201
    if checkpoint.form == "packed" and not _verified(placed.mapped):
        print(  # noqa: T201
            f"{source.path} has no checksums: experts are read without verification; convert the "
            "original again to have them",
            file=sys.stderr,
        )


def _decoded(matrices: Mapping[str, tuple[str, int]], dtype: mx.Dtype) -> Iterator[str]:
    """Yield a line for each type of block of `matrices`, name -> type and elements, which are
    floats of `dtype` in memory."""
    for kind in sorted({kind for kind, _ in matrices.values()}):
        sizes = [elements for of, elements in matrices.values() if of == kind]
        tensors = "tensor" if len(sizes) == 1 else "tensors"
        name = str(dtype).removeprefix("mlx.core.")
        yield (
            f"{len(sizes)} {tensors} of {kind} decoded to {name}, "
            f"{format_bytes(sum(sizes) * dtype.size)}"
        )


def _verified(mapped: MappedTensors) -> bool:
    """Return True if every block of experts has a checksum."""
    return all(isinstance(p, Blocks) and bool(p.checksums) for p in mapped.experts.values())
