"""``mlx_moeflux generate``: text on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_moeflux.cli import Bar
from mlx_moeflux.cli.profile_flags import add_profile_arguments, instrument
from mlx_moeflux.errors import DistributedError, InputError, UnsupportedError
from mlx_moeflux.experts.policies.eviction import DEFAULT_EVICTION

DEFAULT_PROMPT = "def binary_search(items, target):\n"

# Flags of mlx-lm that are refused -> reason.
REFUSED = {
    "--adapter-path": "adapters are not applied to streamed experts",
    "--draft-model": "a draft multiplies the experts that each step reads",
    "--num-draft-tokens": "there is no draft model",
    "--image": "images are not read",
    "--quantize-activations": "activations stay in the compute dtype",
    "--max-kv-size": "the state of the recurrent layers cannot be rotated",
    "--quantized-kv-start": "keys and values are quantised from the first token on",
    "--pipeline": "several machines share the experts of every layer, with --distributed",
    "--trust-remote-code": "no code from a checkpoint runs",
}


DISTRIBUTED = ("distributed", "expert_path", "placement", "exact_prompts")


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="directory or Hugging Face id (default: the bundled model)")
    add("--prompt", "-p", help="text, or - for standard input")
    add("--max-tokens", "-m", type=int, default=100, help="default %(default)s; -1: no limit")
    add("--system-prompt", help="system message, where there is a chat template")
    add("--prefill-response", help="beginning of the reply, where there is a chat template")
    add("--ignore-chat-template", action="store_true", help="take the prompt as it is")
    add("--use-default-chat-template", action="store_true", help="refuse to run without a template")
    add("--chat-template-config", default="{}", help="JSON object of template variables")
    add(
        "--extra-eos-token",
        nargs="*",
        default=[],
        help="tokens or ids that end the reply too",
    )
    add("--stop", action="append", default=[], help="text that ends the reply; may be repeated")
    add_sampling_arguments(parser, *SAMPLING)
    add("--seed", type=int, help="of the draws (default: another each time)")
    add(
        "--verbose",
        type=_boolean,
        default=True,
        help="true or false: print speeds at the end, default true",
    )
    add("--prefill-step-size", type=int, help="tokens a call (default: the whole prompt)")
    add_cache_arguments(parser)
    add("--prompt-cache-file", metavar="FILE", help="go on from what `cache_prompt` wrote")
    add_expert_arguments(parser)
    add_distributed_arguments(parser)
    add("--trace", metavar="FILE", help="record which experts every token chooses")
    add_profile_arguments(parser)
    refuse(parser, REFUSED)


# Flag -> type, default, meaning.
SAMPLING = {
    "--temp": (float, 0.0, "temperature, 0: greedy"),
    "--top-p": (float, 1.0, "the likeliest tokens that have this probability together"),
    "--min-p": (float, 0.0, "tokens with this share of the likeliest one's probability"),
    "--min-tokens-to-keep": (int, 1, "so many in spite of --min-p"),
    "--top-k": (int, 0, "so many of the likeliest tokens, 0: all"),
    "--xtc-probability": (float, 0.0, "how often XTC excludes the likeliest tokens"),
    "--xtc-threshold": (float, 0.1, "probability from which XTC excludes"),
    "--repetition-penalty": (float, None, "factor that weakens recent tokens"),
    "--presence-penalty": (float, None, "what recent tokens lose"),
    "--frequency-penalty": (float, None, "what recent tokens lose each time that they came"),
}


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *flags: str, when: str | None = None
) -> None:
    """Add some of :data:`SAMPLING`. when: The case in which they are used."""
    for flag in flags:
        kind, default, text = SAMPLING[flag]
        parts = [text, when, None if default is None else "default %(default)s"]
        parser.add_argument(
            flag, type=kind, default=default, help="; ".join(part for part in parts if part)
        )


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a prompt cache on disk."""
    add = parser.add_argument
    add("--prompt-cache", metavar="DIR", help="keep states of prompts there and go on from them")
    add("--prompt-cache-disk", default="20GB", metavar="SIZE", help="at most, default %(default)s")


def add_expert_arguments(parser: argparse.ArgumentParser, *, stats: bool = True) -> None:
    """Add the options of loading that all commands with a model share."""
    add = parser.add_argument
    add("--expert-memory", default="auto", metavar="SIZE", help="2GB, 50%% or auto (default)")
    add("--expert-threads", type=int, help="concurrent reads, default 8")
    add("--expert-reader", default="auto", help="auto (default), pread, direct, mmap or memory")
    add("--eviction", default=DEFAULT_EVICTION, help="see 'policies'; default %(default)s")
    add("--prefetch", help="policy of reading ahead, see 'policies'; default none")
    add("--tuning", metavar="FILE", help="file of tune; sets options that are not given")
    add("--experts-per-token", type=int, help="fewer than the model's own: faster and lossy")
    add("--max-context", type=int, help="tokens that a sequence may have")
    add("--kv-bits", type=int, help="keep keys and values in 4 or 8 bits: smaller and lossy")
    add("--kv-group-size", type=int, default=64, help="of --kv-bits, default %(default)s")
    add(
        "--wired-memory",
        metavar="SIZE",
        help="auto, off or a size that macOS never pages out; default auto, off in batches",
    )
    add("--safe", action="store_true", help="for bug reports: references, no traces, no prefetch")
    add_config_argument(parser)
    if stats:
        add("--stats", action="store_true", help="print hits, reads and waiting of each layer")
        add("-v", dest="details", action="store_true", help="with --stats: all counts, and kernels")


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that a message about unknown keys of config.json names."""
    parser.add_argument(
        "--no-strict-config",
        dest="strict_config",
        action="store_false",
        help="ignore keys of config.json that nothing reads",
    )


def add_distributed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that ``mlx.launch`` starts on several machines."""
    add = parser.add_argument
    add("--distributed", action="store_true", help="spread the experts over mlx.launch's ranks")
    add("--expert-path", metavar="DIR", help="read experts there; {rank} stands for the rank")
    add("--placement", default="id", help="id (default), memory:16GB,32GB or popularity:TRACE")
    add("--exact-prompts", action="store_true", help="prompts with the bits of one machine")


def leads() -> bool:
    """Return True on the rank of ``mlx.launch`` that talks to the user, rank 0."""
    import mlx.core as mx

    try:
        return mx.distributed.init(strict=True).rank() == 0
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"{error}; start --distributed with mlx.launch.") from error


def quiet_unless_first(model: Any) -> None:
    """Leave standard output to rank 0."""
    if not model.leads:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # to the end of the process


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading
    from mlx_moeflux.generation import text

    if args.prompt_cache and args.prompt_cache_file:
        raise InputError("give --prompt-cache or --prompt-cache-file, not both.")
    model, tokenizer = loading.load(_model_of(args), **load_options(args), verbose=True)
    quiet_unless_first(model)
    traced = args.trace and model.leads
    tracing = model.trace(args.trace) if traced else contextlib.nullcontext()
    with model, tracing, prompt_cache(args) as known:
        prompt, options = _prompt(args, tokenizer)
        if args.prompt_cache_file:
            known = model.make_cache()
            known.load(args.prompt_cache_file)
            prompt = rest_of_prompt(prompt, options, tokenizer)
        last: Any = None
        with instrument(args, model), Bar("prompt", "tok") as bar:
            stream = text.stream_generate(
                model,
                tokenizer,
                prompt,
                max_tokens=args.max_tokens,
                stop=args.stop,
                stop_ids=_extra_ends(args.extra_eos_token, tokenizer),
                template_options=options,
                seed=args.seed,
                prompt_cache=known,
                prefill_step_size=args.prefill_step_size,
                prompt_progress_callback=bar.update,
                **_sampling(args, tokenizer, model.config.vocab_size),
            )
            if args.prompt is None and isinstance(prompt, str):
                print(prompt, end="")
            for last in stream:
                print(last.text, end="", flush=True)
        print(flush=True)
        if args.stats and model.leads:
            print(stats_table(last.experts, model, details=args.details), file=sys.stderr)
        if args.verbose and model.leads:
            print(text.summary(last), file=sys.stderr)
    return 0


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_expert_arguments` as
    :func:`~mlx_moeflux.loading.load_model` takes them."""
    names = ("expert_memory", "expert_threads", "expert_reader", "experts_per_token", "max_context")
    names += ("eviction", "prefetch", "tuning", "kv_bits", "kv_group_size", "safe")
    names += ("strict_config", "wired_memory")
    names += DISTRIBUTED if hasattr(args, "distributed") else ()
    return {name: getattr(args, name) for name in names}


@contextlib.contextmanager
def prompt_cache(args: argparse.Namespace, **options: Any) -> Iterator[Any]:
    """Yield the cache of :func:`add_cache_arguments`, or None; write pending states at exit."""
    from mlx_moeflux.cache.prompt.cache import PromptCache
    from mlx_moeflux.experts.budget import parse_budget

    if args.prompt_cache is None:
        yield None
        return
    limit = parse_budget(args.prompt_cache_disk, 0)
    if limit is None:
        raise InputError("--prompt-cache-disk is auto; give an amount such as 20GB.")
    with PromptCache(args.prompt_cache, disk_bytes=limit, **options) as cache:
        yield cache


def _model_of(args: argparse.Namespace) -> Any:
    from mlx_moeflux import loading

    if args.model is None and args.prompt_cache_file:
        from mlx_moeflux.cache.state.sequence import read_notes

        args.model = read_notes(args.prompt_cache_file).get("model")
    return args.model or loading.BUNDLED_MODEL


def rest_of_prompt(prompt: Any, options: dict[str, Any], tokenizer: Any) -> Any:
    """Return the ids to append to a cached prefix.

    Text is encoded as it is. Of messages, only the last user message and the template's text after
    it are encoded: they continue the cached message.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=False)
    user = max(i for i, message in enumerate(prompt) if message["role"] == "user")
    marked = [dict(message) for message in prompt]
    marked[user]["content"] = mark = "\x02query\x03"
    text = tokenizer.apply_chat_template(marked, tokenize=False, **options)
    if mark not in text:
        raise InputError("the chat template drops the message that is to go on.")
    rest = prompt[user]["content"] + text[text.rindex(mark) + len(mark) :]
    return tokenizer.encode(rest, add_special_tokens=False)


def _sampling(args: argparse.Namespace, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
    names = ("temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability")
    names += ("xtc_threshold", "repetition_penalty", "presence_penalty", "frequency_penalty")
    kept = kept_by_xtc(tokenizer, vocabulary)
    return {name: getattr(args, name) for name in names} | {"xtc_special_tokens": kept}


def kept_by_xtc(tokenizer: Any, vocabulary: int) -> list[int]:
    """Return the ids that XTC never excludes, as in mlx-lm: a newline and the end of the reply.

    vocabulary: Number of tokens of the model. A config may name an end that it has no row for.
    """
    ids = [*tokenizer.encode("\n", add_special_tokens=False), *sorted(tokenizer.eos_token_ids)]
    return [i for i in ids if i < vocabulary]


def _prompt(args: argparse.Namespace, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """Return the prompt as text or messages, and the template's variables."""
    text = DEFAULT_PROMPT if args.prompt is None else read_prompt(args.prompt)
    options = template_options(args)
    if tokenizer.chat_template is None or args.ignore_chat_template:
        if args.use_default_chat_template and not args.ignore_chat_template:
            raise InputError("this tokenizer has no chat template to use.")
        for flag in ("system_prompt", "prefill_response"):
            if getattr(args, flag):
                name = f"--{flag.replace('_', '-')}"
                raise InputError(f"{name} needs a chat template; there is none or it is ignored.")
        return text, options
    messages = [{"role": "user", "content": text}]
    if args.system_prompt:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    if args.prefill_response:
        messages.append({"role": "assistant", "content": args.prefill_response})
        options["continue_final_message"] = True
    return messages, options


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
    return found


def read_prompt(text: str) -> str:
    """Return the prompt of an argument: ``-`` reads standard input; ``\\n`` is a newline."""
    if text == "-":
        return _standard_input()
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not {error.encoding} at byte {error.start}; re-encode the prompt."
        ) from None


def _extra_ends(tokens: Sequence[str], tokenizer: Any) -> list[int]:
    """Return ids of tokens given as text or, as in mlx-lm, as ids."""
    ids = [
        int(t) if t.isdecimal() and len(t) < 10 else tokenizer.convert_tokens_to_ids(t)
        for t in tokens
    ]
    if None in ids:
        raise InputError(f"--extra-eos-token {tokens[ids.index(None)]!r} is not in the vocabulary.")
    return ids


def stats_table(experts: Any, model: Any, *, details: bool = False) -> str:
    """Return a table of expert statistics by layer, and what was lossy or fell back. details: All
    counts, the active kernels and, on NVIDIA, the number of compiled variants."""
    from mlx_moeflux.kernels.runtime import metal

    rows = [*experts.layers.items(), ("total", experts.total)]
    if details:
        columns = ("tokens", "lookups", "hits", "misses", "hit_rate", "bytes_read", "evictions")
        columns += ("read_seconds", "stall_seconds", "compute_seconds")
        lines = ["layer " + " ".join(f"{name:>15}" for name in columns)]
        for name, layer in rows:
            cells = (getattr(layer, column) for column in columns)
            texts = (f"{c:15.3f}" if isinstance(c, float) else f"{c:15,}" for c in cells)
            lines.append(f"{name!s:5} " + " ".join(texts))
    else:
        lines = ["layer    hits   misses    read MB    wait s"]
        lines += [
            f"{name!s:5} {100 * layer.hit_rate:6.1f}% {layer.misses:8,} "
            f"{layer.bytes_read / 1e6:10,.1f} {layer.stall_seconds:9.2f}"
            for name, layer in rows
            if layer.lookups or name == "total"
        ]
    if experts.total.proposed:
        lines.append(str(experts).split(", compute ")[1].split(", ", 1)[1])
    if details:
        kernels = ", ".join(f"{op}={form}" for op, form in model.kernels.names().items())
        lines.append(f"kernels: {kernels}")
        if (files := metal.cuda_files()) is not None:
            lines.append(f"compiled: {files.count}")
    lines += model.kernels.fallbacks()
    return "\n".join([*lines, *(f"lossy: {what}" for what in experts.lossy)])


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "t", "f"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1", "t")
