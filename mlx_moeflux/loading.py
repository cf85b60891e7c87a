"""Load a model and its tokenizer from a path or a hub id."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

import mlx.core as mx

from mlx_moeflux.backend import set_device_variables
from mlx_moeflux.checkpoint.hub import resolve
from mlx_moeflux.checkpoint.names import MappedTensors
from mlx_moeflux.checkpoint.quantization import Quantization
from mlx_moeflux.checkpoint.source import Checkpoint, open_checkpoint
from mlx_moeflux.checkpoint.tensors import Blocks
from mlx_moeflux.checks import check_callable
from mlx_moeflux.distributed.part import Part
from mlx_moeflux.distributed.placement import ById, Placement
from mlx_moeflux.distributed.ranks import reporting
from mlx_moeflux.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    MemoryBudgetError,
    MoefluxError,
    ShapeError,
)
from mlx_moeflux.experts.budget import Memory, Plan, format_bytes, make_plan, measure_memory
from mlx_moeflux.experts.compute import ExpertMix
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.native_pool import staging_bytes
from mlx_moeflux.experts.io.readers import Reader, check_reader, make_reader
from mlx_moeflux.experts.io.samples import check_scales, experts_identity
from mlx_moeflux.experts.policies.eviction import DEFAULT_EVICTION, Eviction, make_eviction
from mlx_moeflux.experts.policies.named import NONE
from mlx_moeflux.experts.policies.prefetch import Prefetch, make_prefetch
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.experts.store import ExpertStore, check_members, check_result
from mlx_moeflux.experts.streaming.store import DEFAULT_THREADS, StreamedStore, check_threads
from mlx_moeflux.experts.telemetry.events import EventHook
from mlx_moeflux.experts.telemetry.forecast import open_tuning
from mlx_moeflux.generation.memory import parse_wired_memory
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.registry import Kernels, choose_kernels
from mlx_moeflux.kernels.runtime import metal
from mlx_moeflux.kernels.runtime.packing import largest_buffer
from mlx_moeflux.models import model_class, read_config
from mlx_moeflux.models.base import StreamingModel
from mlx_moeflux.models.moe import Router, check_router
from mlx_moeflux.models.weights import ExpertsOnDisk, check_experts, default_dtype, fill_trunk
from mlx_moeflux.tokenizer import Tokenizer, load_tokenizer

BUNDLED_MODEL = Path(__file__).parent / "data" / "tiny"
KV_POSITIONS = 8192

P = ParamSpec("P")
R = TypeVar("R")


class LoadOptions(TypedDict, total=False):
    """Options of :func:`load_model`, which documents them."""

    expert_memory: str | float | None
    expert_reader: str
    expert_threads: int | None
    experts_per_token: int | None
    max_context: int | None
    kv_bits: int | None
    kv_group_size: int
    wired_memory: str | float | None
    dtype: mx.Dtype | None
    router: Router | None
    store: ExpertStore | None
    reader: Reader | None
    kernels: str | Mapping[str, str | Callable[..., Any]] | Kernels | None
    check_values: bool
    eviction: str | Eviction
    prefetch: str | Prefetch | None
    keep_all_ahead: bool
    tuning: str | os.PathLike[str] | None
    events: EventHook | None
    fuse: bool | None
    strict_config: bool
    expert_path: str | os.PathLike[str] | None
    distributed: Any
    placement: str | Placement
    exact_prompts: bool
    safe: bool
    verbose: bool


def check_options(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Compare the names of given options with the known ones.

    Raises:
        InputError: A name is unknown; the message has the nearest known name.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            mend = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}."
            raise InputError(f"{function} has no option '{name}'; {mend}")


def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    **options: Unpack[LoadOptions],
) -> tuple[StreamingModel, Tokenizer]:
    """Load a checkpoint: a directory, or a Hugging Face id such as ``org/name``.

    options: Those of :func:`load_model`. tokenizer_config: Overrides tokenizer_config.json.

    Raises:
        MoefluxError: One of its kinds, in one sentence; see :mod:`mlx_moeflux.errors`.
    """
    own = ("revision", "tokenizer_config")
    check_options("load", options, (*own, *LoadOptions.__annotations__))
    with reporting(options.get("distributed")) as ranks:
        directory = resolve(path_or_hub_id, revision=revision)
        tokenizer = load_tokenizer(directory, **dict(tokenizer_config or {}))
        return load_model(directory, **{**options, "distributed": ranks}), tokenizer


def _in_prepared_process(function: Callable[P, R]) -> Callable[P, R]:
    """Make :func:`load_model` refuse unknown keywords, set the variables that MLX reads at its
    first use of a GPU, and leave MLX's random state as it was.

    Building layers draws initial weights, which must not change the caller's random state.
    """

    @wraps(function)
    def prepared(*args: P.args, **kwargs: P.kwargs) -> R:
        check_options(function.__name__, kwargs.keys() - {"path"}, LoadOptions.__annotations__)
        set_device_variables()
        metal.cuda_files()
        high, low = mx.random.state[0].tolist()  # pyright: ignore[reportIndexIssue]  # it is a list
        try:
            with reporting(kwargs.get("distributed")) as ranks:
                return function(*args, **{**kwargs, "distributed": ranks})
        finally:
            mx.random.seed(high << 32 | low)

    return prepared


@_in_prepared_process
def load_model(
    path: str | os.PathLike[str],
    *,
    expert_memory: str | float | None = "auto",
    expert_reader: str = "auto",
    expert_threads: int | None = None,
    experts_per_token: int | None = None,
    max_context: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    wired_memory: str | float | None = None,
    dtype: mx.Dtype | None = None,
    router: Router | None = None,
    store: ExpertStore | None = None,
    reader: Reader | None = None,
    kernels: str | Mapping[str, str | Callable[..., Any]] | Kernels | None = None,
    check_values: bool = True,
    eviction: str | Eviction = DEFAULT_EVICTION,
    prefetch: str | Prefetch | None = None,
    keep_all_ahead: bool = False,
    tuning: str | os.PathLike[str] | None = None,
    events: EventHook | None = None,
    fuse: bool | None = None,
    strict_config: bool = True,
    expert_path: str | os.PathLike[str] | None = None,
    distributed: Any = None,
    placement: str | Placement = ById.name,
    exact_prompts: bool = False,
    safe: bool = False,
    verbose: bool = False,
) -> StreamingModel:
    """Load a checkpoint directory without its tokenizer; everything is evaluated.

    The first call sets the environment variables of
    :func:`~mlx_moeflux.backend.set_device_variables`. No call changes the state of ``mx.random``.

    Args:
        expert_memory: Bytes for routed experts over all layers: ``2GB``, ``512MiB``, ``50%`` (of
            all routed experts), a number, or ``auto``. If all fit, they become parameters.
        expert_reader: ``auto``, ``pread``, ``direct``, ``mmap`` or ``memory``.
        expert_threads: Number of concurrent reads; default 8.
        experts_per_token: Fewer experts than the config's number; faster and lossy, which the
            statistics report.
        max_context: Tokens a sequence may have, at most the config's limit.
        kv_bits, kv_group_size: Store keys and values in 4 or 8 bits with one scale a group;
            smaller and lossy, which the statistics report.
        wired_memory: Memory that macOS never pages out: ``auto`` (trunk, experts and state),
            ``off`` or a size. The first generation of a process sets it for the whole process.
            Default: ``auto`` for single sequences, ``off`` for batches.
        dtype: Compute dtype and that of the trunk's floats; default bfloat16 on GPUs, float32 on
            the CPU. Routed experts keep the dtypes of the checkpoint.
        router, store, reader, eviction, prefetch, kernels: Replacements for the parts of the
            same name; their protocols state shapes, and a wrong shape raises here. kernels:
            operation -> name of an implementation or a callable, or a text such as
            "auto,sdpa=reference".
        check_values: Compare a callable in `kernels` with the reference by value on small cases;
            pass False for one that is meant to differ.
        tuning: A file that ``tune`` wrote for this model; it sets the arguments above that have
            their default.
        keep_all_ahead: Wait for all prefetched experts, so that hits do not depend on timing.
        events: Event hook of the expert store.
        fuse: Concatenate projections that share an input (``model.prepare()``); default on GPUs.
        strict_config: Refuse unknown keys of config.json.
        expert_path: Checkpoint directory of the same model from which the experts are read; default
            `path`. On several ranks it may be the part that ``convert(shard=...)`` wrote, and
            ``{rank}`` in it stands for the rank.
        distributed: A group of ``mx.distributed``, or True for the one of ``mx.launch``: the
            experts are spread over its ranks, which all make the same calls of the model.
            expert_memory and the plan are then those of this rank's experts.
        placement: Which rank holds which experts; see
            :func:`~mlx_moeflux.distributed.placement.make_placement`.
        exact_prompts: Give prompts on several ranks the bits of one process, at more bytes; decode
            steps have them always.
        safe: For bug reports: references instead of kernels, no traced steps, no prefetch.
        verbose: Print the plan, one line on stderr; on a terminal show a bar while experts load.

    Raises:
        MoefluxError: One of its kinds, in one sentence.
    """
    if safe:
        if kernels not in (None, "reference") or prefetch not in (None, NONE):
            raise InputError("safe excludes kernels and prefetch; leave them out.")
        kernels, prefetch, fuse = "reference", NONE, False
    wired_memory = parse_wired_memory(wired_memory)
    check_callable("events", events)
    if not isinstance(dtype, mx.Dtype | None):
        raise InputError(f"dtype is {dtype!r}; give an MLX dtype such as mx.bfloat16.")
    for name, number in (("experts_per_token", experts_per_token), ("max_context", max_context)):
        if not isinstance(number, int | None):
            raise InputError(f"{name} is {number!r}; give an integer.")
    memory, eviction = measure_memory(), make_eviction(eviction)
    checkpoint = open_checkpoint(path)
    tuned: dict[str, Any] = {
        "expert_memory": "auto", "expert_reader": "auto", "expert_threads": DEFAULT_THREADS,
        "prefetch": None,
    }  # fmt: skip
    if tuning is not None:
        tuned |= open_tuning(tuning)
        if tuned["model"] != checkpoint.identity():
            raise InputError(f"{tuning} was written for another model than {path}; tune this one.")
    expert_memory = None if expert_memory == "auto" else expert_memory
    threads = tuned["expert_threads"] if expert_threads is None else expert_threads
    check_threads(threads)
    expert_reader = tuned["expert_reader"] if expert_reader == "auto" else expert_reader
    prefetch = make_prefetch(tuned["prefetch"] if prefetch is None else prefetch)
    kind = model_class(checkpoint.config.get("model_type"), file=checkpoint.config_file)
    config = read_config(checkpoint, strict=strict_config)
    if not isinstance(kernels, Kernels):
        kernels = choose_kernels(kernels, check_values=check_values)
    own_k = config.num_experts_per_tok
    if experts_per_token is not None and not 1 <= experts_per_token <= own_k:
        raise InputError(
            f"experts_per_token is {experts_per_token}; this model allows 1 to {own_k}."
        )
    if router is None:
        router = kind.make_router(config, kernels, experts_per_token=experts_per_token)
    elif experts_per_token is not None:
        raise InputError("give either a router or experts_per_token: a router has its own K.")
    else:
        check_router(router, config.num_experts)
    assert router is not None
    rules = config.name_rules()
    mapped, stored = checkpoint.mapped(rules), checkpoint
    if expert_path is not None:
        rank = 0 if distributed is None else distributed.rank
        stored = open_checkpoint(os.fspath(expert_path).replace("{rank}", str(rank)))
        mapped = dataclasses.replace(mapped, experts=stored.mapped(rules).experts)
    try:
        model = kind(config, router=router, kernels=kernels)
    except MoefluxError:
        raise
    # MLX raises one of these, by how far a dimension is out of range.
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{checkpoint.config_file}: its sizes multiply to 0 or to more than an array can have; "
            "config.json and the weights are of different models."
        ) from error
    layouts = check_experts(model, mapped, directory=stored.directory, of=stored.of)
    check_scales(stored.blocks)
    part, identified = None, mapped.experts
    if distributed is not None:
        if store is not None or reader is not None:
            raise InputError("distributed excludes a store or a reader; leave them out.")
        part = Part.of(
            distributed,
            placement,
            layers=layouts,
            num_experts=config.num_experts,
            mix=kernels.expert_mix,
        )
        identified = part.identified(mapped.experts, stored)
        mapped = dataclasses.replace(mapped, experts=part.held(mapped.experts, stored))
    elif exact_prompts or placement != ById.name:
        raise InputError("placement and exact_prompts are for several ranks; give distributed too.")
    elif stored.held:
        raise InputError(
            f"{stored.directory} has one rank's experts; load with distributed, or take the "
            "whole checkpoint."
        )
    dtype = dtype or default_dtype()
    specs = checkpoint.quantization.renamed(lambda p: rules.canonical(f"{p}.")[:-1])
    _check_global_scales(specs, layouts, stored)
    fill_trunk(model, mapped, specs, directory=checkpoint.directory, dtype=dtype)
    model.set_context_limit(max_context)
    model.wired_memory = wired_memory
    model.identity = checkpoint.identity()
    model.experts_identity = partial(experts_identity, identified)
    if kv_bits is not None:
        model.quantize_cache(kv_bits, kv_group_size)
    if store is None:
        store, model.plan = _make_store(
            model,
            mapped,
            layouts,
            budget=tuned["expert_memory"] if expert_memory is None else expert_memory,
            memory=memory,
            reader=reader or make_reader(expert_reader, mapped.experts),
            custom_reader=reader is not None,
            part=part,
            threads=threads,
            events=events if part is None else None,
            verbose=verbose,
            eviction=eviction,
            prefetch=prefetch,
            keep_all_ahead=keep_all_ahead,
        )
        store.stats().mark_lossy_later(kernels.unpromised)
        if verbose:
            whose = "" if part is None else f"rank {part.ranks.rank} of {part.ranks.size}: "
            print(f"{whose}{model.plan}", file=sys.stderr)  # noqa: T201
            if checkpoint.approximated:
                print(checkpoint.approximated, file=sys.stderr)  # noqa: T201
            if checkpoint.form == "packed" and not _verified(mapped):
                print(  # noqa: T201
                    f"{path} has no checksums: experts are read without verification; convert the "
                    "original again to have them",
                    file=sys.stderr,
                )
            if unmeasured := dispatch.hint(metal.backend().name):
                print(unmeasured, file=sys.stderr)  # noqa: T201
    else:
        _check_store(store, model, layouts, dtype)
    if part is not None:
        store = part.store(store, events=events, exact_prompts=exact_prompts)
    model.set_store(store)
    if safe:
        model.compile_steps = False
    if checkpoint.approximated:
        store.stats().mark_lossy(checkpoint.approximated)
    if router.num_experts_per_tok < own_k:
        store.stats().mark_lossy(f"experts_per_token {router.num_experts_per_tok} of {own_k}")
    if kv_bits is not None:
        store.stats().mark_lossy(f"kv_bits {kv_bits}")
    if fuse or (fuse is None and mx.default_device() != mx.cpu):
        model.prepare()
    if part is not None:
        part.agree(model, exact_prompts=exact_prompts)
    return model


def _check_global_scales(
    specs: Quantization, layouts: Mapping[int, BlockLayout], checkpoint: Checkpoint
) -> None:
    """Raise CheckpointError for experts without the global scales that config.json says they have.

    Without them every number would be another one; other settings follow from the shapes.
    """
    for layer, layout in layouts.items():
        for projection, spec in layout.specs.items():
            path = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
            declared = specs.spec(path)
            if declared is not None and declared.global_scale and not (spec and spec.global_scale):
                raise CheckpointError(
                    f"{checkpoint.directory}: config.json says that '{path}' has a global_scale, "
                    "but there is none; fetch the shard that holds it."
                )


def _verified(mapped: MappedTensors) -> bool:
    """Return True if every block of experts has a checksum."""
    return all(isinstance(p, Blocks) and bool(p.checksums) for p in mapped.experts.values())


def _make_store(
    model: StreamingModel,
    mapped: MappedTensors,
    layouts: dict[int, BlockLayout],
    *,
    budget: str | float,
    memory: Memory,
    reader: Reader,
    custom_reader: bool,
    part: Part | None,
    threads: int,
    events: EventHook | None,
    verbose: bool,
    **policies: Any,
) -> tuple[ExpertStore, Plan]:
    """Plan the memory of the experts and build their store; closes `reader` unless it is used.

    part: This rank's, whose experts alone `mapped` has; None: one process has all. policies:
    Passed to :class:`StreamedStore`.
    """
    config = model.config
    E, mix = config.num_experts, model.kernels.expert_mix
    if part is not None:
        E, mix = part.num_experts, part.mix
    try:
        if custom_reader:
            check_reader(
                reader,
                layers=sorted(layouts),
                num_experts=E,
                hidden=config.hidden_size,
                intermediate=config.moe_intermediate_size,
            )
        plan = make_plan(
            budget,
            {layer: layout.nbytes for layer, layout in layouts.items()},
            num_experts=E,
            experts_per_token=min(model.router.num_experts_per_tok, E),
            trunk_bytes=model.trunk_bytes(),
            kv_bytes=model.state_bytes(min(KV_POSITIONS, config.max_position_embeddings)),
            memory=memory,
            reader=reader.name,
            staging_bytes=staging_bytes(reader, threads),
        )
        _check_buffers(plan, layouts)
        if plan.resident and not custom_reader:
            reader.close()
            return _resident(model, mapped, layouts, E, mix, events, verbose), plan
        return StreamedStore(
            reader,
            plan.slots,
            threads=threads,
            events=events,
            mix=mix,
            activation=model.activation,
            **policies,
        ), plan
    except BaseException:
        if hasattr(reader, "close"):
            reader.close()
        raise


def _check_buffers(plan: Plan, layouts: dict[int, BlockLayout]) -> None:
    """Compare the arrays of experts with the largest buffer of the GPU.

    Raises:
        MemoryBudgetError: One is larger.
    """
    most = largest_buffer()
    for layer, slots in plan.slots.items():
        component = max(layouts[layer].components, key=lambda c: c.nbytes)
        if most is not None and slots * component.nbytes > most:
            fitting = plan.budget_bytes * (most // component.nbytes) // slots
            raise MemoryBudgetError(
                f"'{component.name}' of {slots} experts of layer {layer} takes "
                f"{format_bytes(slots * component.nbytes)}, and a buffer of this GPU at most "
                f"{format_bytes(most)}; give an expert_memory of at most {format_bytes(fitting)}."
            )


def _resident(
    model: StreamingModel,
    mapped: MappedTensors,
    layouts: dict[int, BlockLayout],
    num_experts: int,
    mix: ExpertMix,
    events: EventHook | None,
    verbose: bool,
) -> ResidentStore:
    layers = {i: (mapped.experts[i], layouts[i].specs) for i in model.moe_blocks()}
    disk = ExpertsOnDisk(model.moe_blocks(), layers, model.activation)
    disk.read(verbose=verbose and sys.stderr.isatty())
    return ResidentStore(
        disk.bank,
        layers=layers,
        num_experts=num_experts,
        events=events,
        mix=mix,
        block_bytes={layer: layout.nbytes for layer, layout in layouts.items()},
        disk=disk,
    )


def _check_store(
    store: ExpertStore, model: StreamingModel, layouts: dict[int, BlockLayout], dtype: mx.Dtype
) -> None:
    """Run a custom store once.

    Raises:
        InputError: It is no ExpertStore, or a class.
        ShapeError: Its layers, or shape, dtype or values of its result, are wrong.
    """
    if isinstance(store, type):
        raise InputError(f"the given store {store.__name__} is a class; pass an instance of it.")
    name, N, C = type(store).__name__, 3, model.config.hidden_size
    if not isinstance(store, ExpertStore):
        raise InputError(f"the given store is a {name}; make its class a subclass of ExpertStore.")
    check_members(store)
    if tuple(store.layers) != tuple(sorted(layouts)):
        raise ShapeError(f"{name} has layers {list(store.layers)}, expected {sorted(layouts)}.")
    logits = mx.random.normal((N, model.config.num_experts), key=mx.random.key(0))
    ids, weights = model.router(logits)
    x = mx.random.normal((N, C), key=mx.random.key(1)).astype(dtype)
    for layer in store.layers:
        try:
            y = store.experts(layer, x, ids, weights)
        except Exception as error:
            raise InputError(
                f"{name}.experts fails in layer {layer}: {type(error).__name__}: {error}."
            ) from error
        check_result(store, layer, x, y)
        if not mx.isfinite(y).all().item():
            raise ShapeError(
                f"{name}.experts returns numbers that are not finite in layer {layer}."
            )
