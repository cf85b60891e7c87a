"""Arguments that several commands take, and the functions that read them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moeflux.checkpoint.files import read_whole
from mlx_moeflux.cli.messages import say
from mlx_moeflux.errors import DistributedError, InputError, UnsupportedError
from mlx_moeflux.generation.sampling_fields import SAMPLING_FIELDS
from mlx_moeflux.loading.options import FLAGS, LoadOptions

if TYPE_CHECKING:
    from mlx_moeflux.models.protocol import LoadedModel

# The options of loading that commands with a model share, and those of commands that ``mlx.launch``
# starts on several machines.
LOADING = tuple(name for name, flag in FLAGS.items() if not flag.ranks)
RANKS = tuple(name for name, flag in FLAGS.items() if flag.ranks)

# What a model may be named by, in a help text.
MODEL = "directory, Hugging Face id or short name"

# After so long without a word on standard input, say that it is read.
NOTICE_SECONDS = 2.0

LINE_END = "\n"

# What a prompt cache has of the memory that a model may fill.
PROMPT_SHARE = "10%"

# Flags of mlx-lm that are refused -> reason.
REFUSED = {
    "--adapter-path": "adapters are not applied to streamed experts",
    "--draft-model": "drafts come from the text or the model's own head, with --drafts",
    "--num-draft-tokens": "--drafts says how many are read at a time",
    "--image": "images are not read",
    "--quantize-activations": "activations stay in the compute dtype",
    "--max-kv-size": "the state of the recurrent layers cannot be rotated",
    "--quantized-kv-start": "keys and values are quantised from the first token on",
    "--pipeline": "several machines share the experts of every layer, with --distributed",
    "--trust-remote-code": "no code from a checkpoint runs",
}


class _Refuse(argparse.Action):
    """Action that refuses its flag with a reason."""

    def __init__(self, option_strings, dest, *, why: str):
        super().__init__(option_strings, dest, nargs="*", help=argparse.SUPPRESS)
        self._why = why

    def __call__(self, parser, namespace, values, option_string=None):
        raise UnsupportedError(f"{option_string} does not apply: {self._why}.")


def refuse(
    parser: argparse.ArgumentParser, flags: Iterable[str], reasons: Mapping[str, str] = REFUSED
) -> None:
    """Make the parser refuse each of `flags` with its reason."""
    for flag in flags:
        names = [flag, "-qa"] if flag == "--quantize-activations" else [flag]
        parser.add_argument(*names, action=_Refuse, why=reasons[flag])


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *names: str, when: str | None = None
) -> None:
    """Add flags of :data:`SAMPLING_FIELDS`. when: The case in which they are used."""
    for name in names:
        field = SAMPLING_FIELDS[name]
        parts = [field.help, when, None if field.default is None else "default %(default)s"]
        text = "; ".join(part for part in parts if part)
        parser.add_argument(field.flag, type=field.kind, default=field.default, help=text)


def given_sampling(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of sampling of these names."""
    return {name: getattr(args, name) for name in names}


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *names: str,
    text: str = f"{MODEL} (default: the bundled model)",
) -> None:
    """Add MODEL as a word, ``--model`` and ``--revision``. names: Others of ``--model``. text: Its
    help."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--model", *names, help=text)
    add_revision_argument(parser)


def required_model(args: argparse.Namespace) -> str:
    """Return the model of a command that has no default.

    Raises:
        InputError: None was given.
    """
    if args.model is None:
        raise InputError("there is no model; give MODEL or --model.")
    return args.model


def model_or_bundled(args: argparse.Namespace, mend: str) -> str | Path:
    """Return the model, the bundled one if none was given. mend: What a sentence in the place of
    MODEL is told.

    Raises:
        InputError: MODEL is a sentence, and no such file.
    """
    from mlx_moeflux.loading import BUNDLED_MODEL

    model = args.model
    if model is not None and len(model.split()) > 1 and not Path(model).expanduser().exists():
        raise InputError(f"MODEL is {model!r}, which is no model; {mend}.")
    return BUNDLED_MODEL if model is None else model


def add_revision_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--revision``."""
    parser.add_argument("--revision", help="branch, tag or commit on the hub; or MODEL@REVISION")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`machine_memory` and :func:`machine_rates`."""
    add = parser.add_argument
    add("--memory", help="of a machine, such as 32GB (default: what this one has left)")
    add("--ssd-gbps", type=float, help="GB/s (default: measured here, kept for 30 days)")
    add("--measure-disk", action="store_true", help="measure the disk although a speed is kept")
    add("--memory-gbps", type=float, help="GB/s (default: those of this machine's chip)")


def machine_memory(args: argparse.Namespace) -> Any:
    """Return the memory that ``--memory`` describes, or measure this machine's, as loading does.

    Raises:
        InputError: ``--memory`` is no amount.
    """
    from mlx_moeflux.experts.budget import measure_memory
    from mlx_moeflux.measure.plan import described_memory

    return described_memory(args.memory) if args.memory else measure_memory()


def machine_rates(args: argparse.Namespace, place: Path) -> Any:
    """Return the given or measured bandwidths; the disk is that of `place`.

    Raises:
        InputError: The disk's is given and to be measured.
    """
    from mlx_moeflux.measure.rates import find_rates

    if args.measure_disk and args.ssd_gbps is not None:
        raise InputError("--measure-disk and --ssd-gbps exclude each other; give one of them.")
    return find_rates(
        place,
        memory_gbps=args.memory_gbps,
        ssd_gbps=args.ssd_gbps,
        measure_anew=args.measure_disk,
    )


def hint_speed(model: LoadedModel) -> None:
    """Say which speed to expect, at the first run of a model from a disk."""
    from mlx_moeflux.measure.first_run import first_run_hint

    if model.runtime.leads and (line := first_run_hint(model)):
        print(line, file=sys.stderr)


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a prompt cache on disk."""
    add = parser.add_argument
    add("--prompt-cache", metavar="DIR", help="keep states of prompts there and go on from them")
    add("--prompt-cache-disk", default="20GB", metavar="SIZE", help="at most, default %(default)s")


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of memory that is given up for a while."""
    add = parser.add_argument
    idle = "free the experts' memory after so long without a prompt; the next one reads them again"
    add("--idle-release", type=float, metavar="SECONDS", help=idle)
    fixed = "keep the experts' memory also while the system lacks some"
    add("--fixed-memory", action="store_true", help=fixed)


def add_sleep_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option of :class:`~mlx_moeflux.awake.Awake`."""
    asleep = "let a Mac go to sleep meanwhile"
    parser.add_argument("--allow-sleep", action="store_true", help=asleep)


def add_load_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags of these options of :class:`~mlx_moeflux.loading.options.LoadOptions`."""
    for name in names:
        flag, default, word = FLAGS[name], getattr(LoadOptions, name), name.replace("_", "-")
        if flag.both:
            both = argparse.BooleanOptionalAction
            parser.add_argument(f"--{word}", action=both, default=default, help=flag.help)
        elif flag.kind is bool:
            parser.add_argument(
                f"--no-{word}" if default else f"--{word}",
                dest=name,
                action="store_false" if default else "store_true",
                default=default,
                help=flag.help,
            )
        else:
            parser.add_argument(
                f"--{word}",
                type=flag.kind,
                default=default,
                metavar=flag.metavar,
                help=flag.help,
            )


def add_stats_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`stats_table`."""
    add = parser.add_argument
    add("--stats", action="store_true", help="print hits, reads and waiting of each layer")
    add("-v", dest="details", action="store_true", help="with --stats: all counts, and kernels")


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_load_arguments` that the command has, as
    :func:`~mlx_moeflux.loading.load_model` takes them."""
    return {name: getattr(args, name) for name in FLAGS if name in args}


@contextlib.contextmanager
def prompt_cache(args: argparse.Namespace, **options: Any) -> Iterator[Any]:
    """Yield the cache of :func:`add_cache_arguments`, or None; write pending states at exit."""
    from mlx_moeflux.cache.prompt.cache import PromptCache

    limit = prompt_cache_limit(args)
    if args.prompt_cache is None:
        yield None
        return
    with PromptCache(args.prompt_cache, disk_bytes=limit, **options) as cache:
        yield cache


def prompt_cache_limit(args: argparse.Namespace) -> int:
    """Return the bytes of ``--prompt-cache-disk``.

    Raises:
        InputError: They are no amount.
    """
    from mlx_moeflux.experts.budget import parse_budget

    limit = parse_budget(args.prompt_cache_disk, 0, what="prompt cache's size")
    if limit is None:
        raise InputError("--prompt-cache-disk is auto; give an amount such as 20GB.")
    return limit


def leads() -> bool:
    """Return True on the rank of ``mlx.launch`` that talks to the user, rank 0."""
    from mlx_moeflux.distributed.ranks import start_group

    try:
        return start_group().rank() == 0
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"{error}; start --distributed with mlx.launch.") from error


def silence() -> None:
    """Drop what is printed to standard output, to the end of the process."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def quiet_unless_first(model: LoadedModel) -> None:
    """Leave standard output to rank 0."""
    if not model.runtime.leads:
        silence()


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """Parse ``--chat-template-config``."""
    from mlx_moeflux.generation.prompt import check_template_options

    options = json_object("--chat-template-config", args.chat_template_config)
    check_template_options(options)
    return options


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object that a flag was given."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{flag} is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise InputError(f"{flag} must be a JSON object.")
    check_text(flag, json.dumps(found, ensure_ascii=False))
    return found


def check_text(flag: str, text: str) -> None:
    """Raise an InputError if a text from outside has a character that UTF-8 does not, such as half
    of a pair or a byte that could not be decoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{flag} is not UTF-8 at character {error.start + 1}; re-encode the text."
        ) from None


def add_prompt_arguments(parser: argparse.ArgumentParser, *short: str, default: str = "") -> None:
    """Add the options of :func:`given_prompt`. default: What is used if nothing is given."""
    text = "text, after that of standard input if that is a pipe or a file; -: only the latter"
    parser.add_argument("--prompt", *short, help=text + default)
    parser.add_argument("--prompt-file", metavar="FILE", help="text file with the prompt")


def given_prompt(args: argparse.Namespace) -> str | None:
    """Return the prompt of the options and of standard input, None if there is neither.

    In an option ``\\n`` is a newline.

    Raises:
        InputError: Both options are given, or the text is empty, cannot be read or is not UTF-8.
    """
    if args.prompt is not None and args.prompt_file is not None:
        raise InputError("give --prompt or --prompt-file, not both.")
    if args.prompt_file is not None:
        text = _decoded(read_whole(Path(args.prompt_file), error=InputError), args.prompt_file)
        if not text:
            raise InputError(f"{args.prompt_file} is empty; give a file with a prompt.")
        return with_standard_input(args, text)
    if args.prompt == "-":
        return _full(read_standard_input(sys.stdin.read))
    if args.prompt is not None:
        check_text("--prompt", args.prompt)
        text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
        return with_standard_input(args, text)
    return with_standard_input(args, None)


def with_standard_input(args: argparse.Namespace, text: str | None) -> str | None:
    """Return what standard input has, and `text` after it on a line of its own.

    It is read if it is a pipe or a regular file, or without a `text` a socket, and the run has one
    process. Of several processes the launcher has the pipe.

    Raises:
        InputError: It is not UTF-8, or empty without a `text`.
    """
    kinds = (stat.S_ISFIFO, stat.S_ISREG) if text else (stat.S_ISFIFO, stat.S_ISREG, stat.S_ISSOCK)
    mode = _mode(sys.stdin)
    if getattr(args, "distributed", False) or not any(kind(mode) for kind in kinds):
        return text
    # Without this line a program that left the pipe open would see a process that hangs.
    if not select.select([sys.stdin], [], [], NOTICE_SECONDS)[0]:
        instead = "; --prompt gives one" if text is None else ", which </dev/null leaves out"
        print(f"waiting for the prompt on standard input{instead}", file=sys.stderr)
    found = read_standard_input(sys.stdin.read)
    if text is None:
        return _full(found)
    return f"{found.removesuffix(LINE_END)}{LINE_END}{text}" if found else text


def _full(found: str) -> str:
    if not found:
        raise InputError("standard input is empty, so there is no prompt; write one to it.")
    return found


def _mode(stream: Any) -> int:
    """Return the mode of the file that a stream reads, 0 without one."""
    try:
        return os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # closed, or replaced by an object of Python
        return 0


def _decoded(text: bytes, file: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8 at byte {error.start}; re-encode the prompt."
        ) from None


def read_standard_input(read: Callable[[], str]) -> str:
    """Return what `read` gives of standard input.

    Raises:
        InputError: It is not of the encoding that was chosen for it.
    """
    try:
        text = read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not {error.encoding} at byte {error.start}; re-encode it."
        ) from None
    check_text("standard input", text)
    return text


def kept_by_xtc(tokenizer: Any, vocabulary: int) -> list[int]:
    """Return the ids that XTC never excludes, as in mlx-lm: a newline and the end of the reply.

    vocabulary: Number of tokens of the model. A config may name an end that it has no row for.
    """
    ids = [*tokenizer.encode("\n", add_special_tokens=False), *sorted(tokenizer.eos_token_ids)]
    return [i for i in ids if i < vocabulary]


def memory_pressure(args: argparse.Namespace) -> Any:
    """Return what tells a command of :func:`add_memory_arguments` that memory is scarce, or
    None."""
    from mlx_moeflux.experts.system_memory import open_pressure, pressure_gap

    if args.fixed_memory:
        return None
    if gap := pressure_gap():
        say("note", gap)
    return open_pressure()


def stats_table(
    experts: Any, model: LoadedModel, *, details: bool = False, written: int = 0
) -> str:
    """Return a table of expert statistics by layer, what was lossy or fell back, and what the
    process did to the disk. details: All counts, the active kernels and, on NVIDIA, the number of
    compiled variants. written: Bytes of prompt caches."""
    from mlx_moeflux.experts.budget import format_bytes
    from mlx_moeflux.experts.policies.named import label
    from mlx_moeflux.experts.policies.prefetch import Switched
    from mlx_moeflux.kernels.runtime import launcher

    table = experts.table()
    lines = [table.full() if details else table.brief()]
    if ahead := table.read_ahead():
        lines.append(ahead)
    streaming = model.store.streaming
    prefetch = None if streaming is None else streaming.prefetch
    if isinstance(prefetch, Switched):
        lines.append(f"prefetch {label(prefetch)} is {prefetch.switch.report()}")
    if streaming is not None and streaming.timed_budget is not None:
        lines.append(f"expert memory auto is {streaming.timed_budget.report()}")
    if streaming is not None and streaming.ways is not None:
        lines.append(streaming.ways)
    if model.drafting is not None:
        lines += [str(table.drafts), model.drafting.report()]
    lines += table.by_place()
    if streaming is not None or written:
        read = format_bytes(model.store.stats().total.bytes_read)
        lines.append(
            f"disk since the start: {read} of experts read, which does not wear an SSD; "
            f"{format_bytes(written)} of prompt caches written"
        )
    if (rows := model.runtime.row_stats()) is not None:
        lines.append(f"n-gram rows: {rows}")
    if details:
        kernels = ", ".join(f"{op}={name}" for op, name in model.kernels.names().items())
        lines.append(f"kernels: {kernels}")
        if (files := launcher.cuda_files()) is not None:
            lines.append(f"compiled: {files.count}")
    lines += model.kernels.fallbacks()
    return "\n".join([*lines, *(f"lossy: {what}" for what in table.lossy)])
