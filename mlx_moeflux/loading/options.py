"""The options of loading: one list, which signatures, documentation, flags and hints derive from.

A new option is a field of :class:`LoadOptions` and its use in :mod:`mlx_moeflux.loading.steps`.
"""
# ruff: noqa: RUF009  # option() is dataclasses.field()

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.eviction import DEFAULT_EVICTION
from mlx_moeflux.loading import values

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_moeflux.distributed.placement import Placement
    from mlx_moeflux.experts.io.readers import Reader
    from mlx_moeflux.experts.policies.eviction import Eviction
    from mlx_moeflux.experts.policies.prefetch import Prefetch
    from mlx_moeflux.experts.store import ExpertStore
    from mlx_moeflux.experts.telemetry.events import EventHook
    from mlx_moeflux.generation.drafts import Drafts
    from mlx_moeflux.kernels.registry import Kernels
    from mlx_moeflux.models.moe import Router

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Flag:
    """An option on the command line; its name and default are those of the field.

    help: A phrase. kind: Makes the value of a text; bool: there is none, the flag gives the other
    value than the default. both: Of a bool: ``--x`` gives True and ``--no-x`` False. metavar: The
    value in the help. ranks: It belongs to commands that ``mlx.launch`` starts on several machines.
    """

    help: str
    kind: Callable[[str], Any] = str
    metavar: str | None = None
    ranks: bool = False
    both: bool = False


def paths(text: str) -> list[str]:
    """Return the paths of a text in which commas separate them."""
    return text.split(",")


def draft_number(text: str) -> str | int:
    """Return a text as a number if it is one."""
    return int(text) if text.isdecimal() else text


def option(default: T, check: values.Check, text: str, flag: Flag | None = None) -> T:
    """Declare a field of :class:`LoadOptions`. check: Of a value that is not the default. text: Its
    documentation. flag: None: Python only."""
    metadata = {"check": check, "text": text, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of :func:`~mlx_moeflux.loading.load` and :func:`~mlx_moeflux.loading.load_model`."""

    expert_memory: str | float | None = option(
        "auto",
        values.optional(values.amount("auto")),
        "Bytes for routed experts over all layers: ``2GB``, ``512MiB``, ``50%`` (of all routed "
        "experts), a number, or ``auto``. If all fit, they become parameters.",
        Flag("2GB, 50%% or auto (default)", metavar="SIZE"),
    )
    row_memory: str | float = option(
        "64MB",
        values.amount(least=0),
        "Bytes for recent rows of n-gram tables, which stay on disk: an amount, or ``10%`` of the "
        "tables. For models that have them.",
        Flag("of n-gram tables on disk, default %(default)s", metavar="SIZE"),
    )
    reserved_memory: str | float = option(
        0,
        values.amount(least=0),
        "Bytes that ``auto`` leaves besides trunk, experts, a state and 1 GB, such as those of a "
        "prompt cache: an amount, or a percentage of the memory that ``auto`` may fill.",
    )
    expert_reader: str = option(
        "auto",
        values.reader_name,
        "``auto``, ``pread``, ``direct``, ``mmap`` or ``memory``.",
        Flag("auto (default), pread, direct, mmap or memory"),
    )
    expert_threads: int | None = option(
        None,
        values.threads,
        "Number of concurrent reads from each disk; default 8.",
        Flag("concurrent reads from each disk, default 8", int),
    )
    experts_per_token: int | None = option(
        None,
        values.integer,
        "Fewer experts than the config's number; faster and lossy, which the statistics report.",
        Flag("fewer than the model's own: faster and lossy", int),
    )
    max_context: int | None = option(
        None,
        values.integer,
        "Tokens a sequence may have, at most the config's limit.",
        Flag("tokens that a sequence may have", int),
    )
    kv_bits: int | None = option(
        None,
        values.kv_bits,
        "Store keys and values in 4 or 8 bits; smaller and lossy, which the statistics report.",
        Flag("keep keys and values in 4 or 8 bits: smaller and lossy", int),
    )
    kv_group_size: int = option(
        64,
        values.kv_group_size,
        "Numbers that share a scale, with `kv_bits`.",
        Flag("of --kv-bits, default %(default)s", int),
    )
    requantize: bool = option(
        False,
        values.boolean,
        "Give experts and trunk of GGUF MLX's forms throughout. Those of Q4_0, Q4_1, Q5_0, Q5_1, "
        "Q8_0, Q4_K, Q5_K and MXFP4 are exact; other types get 8 bits, which is lossy, and the "
        "statistics report it.",
        Flag("MLX's forms for GGUF's blocks, 8 bits where none is exact: lossy", bool),
    )
    wired_memory: str | float | None = option(
        None,
        values.wired,
        "Memory that macOS never pages out: ``auto`` (trunk, experts and state), ``off`` or a "
        "size. The first generation of a process sets it for the whole process. Default: ``auto`` "
        "for single sequences, ``off`` for batches.",
        Flag(
            "auto, off or a size that macOS never pages out; default auto, off in batches",
            metavar="SIZE",
        ),
    )
    dtype: mx.Dtype | None = option(
        None,
        values.dtype,
        "Compute dtype and that of the trunk's floats; default bfloat16 on GPUs, float32 on the "
        "CPU. Routed experts keep the dtypes of the checkpoint.",
    )
    router: Router | None = option(
        None,
        values.router,
        "Replaces the model's router. The protocol of each replacement states shapes, and a wrong "
        "shape raises here.",
    )
    store: ExpertStore | None = option(None, values.store, "Replaces the store of experts.")
    reader: Reader | None = option(None, values.reader, "Replaces the reader of expert blocks.")
    kernels: str | Mapping[str, str | Callable[..., Any]] | Kernels | None = option(
        None,
        values.kernels,
        "Operation -> name of an implementation or a callable, or a text such as "
        '"auto,sdpa=reference".',
    )
    check_values: bool = option(
        True,
        values.boolean,
        "Compare a callable in `kernels` with the reference by value on small cases; pass False "
        "for one that is meant to differ.",
    )
    prompt_kernels: str = option(
        values.AUTO,
        values.prompt_kernels,
        "``stock``: stock MLX computes the experts of prompts, several rows in a tile, for GPUs "
        "with matrix units. Results have not the same bits at every memory for experts then, which "
        "the statistics report. ``auto``: implementations that have.",
        Flag("auto (default), or stock: experts of prompts by MLX, whose bits vary with memory"),
    )
    eviction: str | Eviction = option(
        DEFAULT_EVICTION,
        values.eviction,
        "Policy that chooses the expert that loses its slot: a name or an object.",
        Flag("see 'policies'; default %(default)s"),
    )
    prefetch: str | Prefetch | None = option(
        None,
        values.prefetch,
        "Policy of reading ahead: a name or an object. Default: ``auto`` on Apple's GPUs without a "
        "handshake, else ``none``.",
        Flag("policy of reading ahead, see 'policies'; default: auto on Apple's GPUs"),
    )
    handshake: bool | None = option(
        None,
        values.boolean,
        "Decode one sequence with kernels that wait for experts on the GPU, instead of returning "
        "to Python in each layer, where nothing excludes it. Results keep their bits. Default: on "
        "NVIDIA. True: on Apple's GPUs too, after a trial, which nobody has seen there yet. False: "
        "nowhere.",
        Flag("kernels that wait on Apple's GPUs too, or nowhere; default: NVIDIA", bool, both=True),
    )
    keep_all_ahead: bool = option(
        False,
        values.boolean,
        "Wait for all prefetched experts, so that hits do not depend on timing.",
    )
    drafts: str | int | Drafts = option(
        "off",
        values.drafts,
        "Guess the next tokens and read several in one step; the text stays the same bit for bit. "
        "``auto``: the best that the model has, as many as time says; ``mtp``: its head of "
        "multi-token prediction, which is loaded then; ``lookup``: continuations of n-grams in "
        "prompt and reply; 1 to 3: always so many; an object that proposes; or ``off``.",
        Flag("auto, mtp, lookup, 1 to 3 at a time, or off (default)", draft_number),
    )
    mtp_path: str | os.PathLike[str] | None = option(
        None,
        values.path,
        "File or directory in safetensors with the head of multi-token prediction of `drafts`; "
        "default: the checkpoint's.",
        Flag("file or directory with the head of multi-token prediction", metavar="PATH"),
    )
    tuning: str | os.PathLike[str] | None = option(
        None,
        values.path,
        "A file that ``tune`` wrote for this model; it sets those of the other options that have "
        "their default.",
        Flag("file of tune; sets options that are not given", metavar="FILE"),
    )
    events: EventHook | None = option(None, values.event_hook, "Event hook of the expert store.")
    fuse: bool | None = option(
        None,
        values.boolean,
        "Concatenate projections that share an input (``model.prepare()``); default on GPUs.",
    )
    gguf_file: str | None = option(
        None,
        values.text,
        "Which of several GGUF models of a folder or repository: a quantisation such as "
        "``Q4_K_M``, or a file's name.",
        Flag("which GGUF model: a quantisation such as Q4_K_M, or a file", metavar="NAME"),
    )
    strict_config: bool = option(
        True,
        values.boolean,
        "Refuse unknown keys of config.json and of GGUF's metadata.",
        Flag("ignore keys of config.json or GGUF that nothing reads", bool),
    )
    expert_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = option(
        None,
        values.paths,
        "Checkpoint directory of the same model from which the experts are read; default: the "
        "model's. Of a list of copies on several disks, each block comes from the one that is "
        "expected to give it first. On several ranks it may be the part that "
        "``convert(shard=...)`` wrote, and ``{rank}`` in it stands for the rank.",
        Flag(
            "read experts there, or from copies on several disks; {rank} stands for the rank",
            paths,
            metavar="DIR[,DIR]",
            ranks=True,
        ),
    )
    distributed: Any = option(
        None,
        values.group,
        "A group of ``mx.distributed``, or True for the one of ``mx.launch``: the experts are "
        "spread over its ranks, which all make the same calls of the model. `expert_memory` and "
        "the plan are then those of this rank's experts.",
        Flag("spread the experts over mlx.launch's ranks", bool, ranks=True),
    )
    placement: str | Placement = option(
        "id",
        values.placement,
        "Which rank holds which experts; see "
        ":func:`~mlx_moeflux.distributed.placement.make_placement`.",
        Flag("id (default), memory:16GB,32GB or popularity:TRACE", ranks=True),
    )
    exact_prompts: bool = option(
        False,
        values.boolean,
        "Give prompts on several ranks the bits of one process, at more bytes; decode steps have "
        "them always.",
        Flag("prompts with the bits of one machine", bool, ranks=True),
    )
    safe: bool = option(
        False,
        values.boolean,
        "For bug reports: references instead of kernels, no traced steps, no prefetch.",
        Flag("for bug reports: references, no traces, no prefetch", bool),
    )
    verbose: bool = option(
        False,
        values.boolean,
        "Print the plan, one line on stderr; on a terminal show a bar while experts load.",
    )


NAMES = tuple(field.name for field in dataclasses.fields(LoadOptions))
# Name -> flag, of the options that a command line has.
FLAGS: dict[str, Flag] = {
    field.name: field.metadata["flag"]
    for field in dataclasses.fields(LoadOptions)
    if field.metadata["flag"] is not None
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadModelArguments(LoadOptions):
    """What :func:`~mlx_moeflux.loading.load_model` takes."""

    path: str | os.PathLike[str] = dataclasses.field(metadata={"check": values.path})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadArguments(LoadOptions):
    """What :func:`~mlx_moeflux.loading.load` takes."""

    path_or_hub_id: str | os.PathLike[str] = dataclasses.field(metadata={"check": values.path})
    revision: str | None = dataclasses.field(
        default=None, kw_only=True, metadata={"check": values.text}
    )
    tokenizer_config: Mapping[str, Any] | None = dataclasses.field(
        default=None, kw_only=True, metadata={"check": values.mapping}
    )


def takes(arguments: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the signature of a class of `arguments`, for type checkers and ``help``, and
    list the options at the end of its docstring."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        own = inspect.signature(function)
        signature = inspect.signature(arguments).replace(return_annotation=own.return_annotation)
        function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = f"{text}\n\nOptions:\n{_listed()}\n"
        return function

    return decorate


def _listed() -> str:
    """Return the documentation of all options, as an indented list."""
    return "\n".join(
        textwrap.fill(
            f"{field.name}: {field.metadata['text']}",
            width=88,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
        for field in dataclasses.fields(LoadOptions)
    )


def check_arguments(
    function: str, arguments: type[LoadOptions], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare the names of given arguments with those that a function takes, and check the values.
    No file is opened.

    Returns:
        The given arguments; an integer of another type, such as NumPy's, is one of Python's.

    Raises:
        InputError: A name is unknown, and the message has the nearest known one; or a value is of
            another type, unit or range.
    """
    known = {field.name: field for field in dataclasses.fields(arguments)}
    checked = {name: _plain(value) for name, value in given.items()}
    for name, value in checked.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            mend = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}."
            raise InputError(f"{function} has no option '{name}'; {mend}")
        if value is not known[name].default:
            known[name].metadata["check"](name, value)
    return checked


def _plain(value: Any) -> Any:
    """Return an integer as Python's, whose sums do not overflow, and another value as it is."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
