"""``mlx_moeflux generate``: text on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_moeflux.cli.common import (
    LOADING,
    RANKS,
    REFUSED,
    add_cache_arguments,
    add_load_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_sampling_arguments,
    add_stats_arguments,
    check_text,
    given_prompt,
    given_sampling,
    hint_speed,
    kept_by_xtc,
    load_options,
    model_or_bundled,
    prompt_cache,
    prompt_cache_limit,
    quiet_unless_first,
    refuse,
    stats_table,
    template_options,
)
from mlx_moeflux.cli.messages import Bar, Trying
from mlx_moeflux.cli.profile_flags import add_profile_arguments, instrument, trace_file
from mlx_moeflux.errors import InputError
from mlx_moeflux.generation.sampling_fields import SAMPLING_FIELDS

DEFAULT_PROMPT = "def binary_search(items, target):\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add_prompt_arguments(parser, "-p", default=" (default: a line of Python)")
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
    add_sampling_arguments(parser, *SAMPLING_FIELDS)
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
    add_load_arguments(parser, *LOADING)
    add_stats_arguments(parser)
    add_load_arguments(parser, *RANKS)
    add("--trace", metavar="FILE", help="record which experts every token chooses")
    add_profile_arguments(parser)
    refuse(parser, REFUSED)


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading
    from mlx_moeflux.cache.prompt.cache import PromptCache
    from mlx_moeflux.generation import text

    if args.prompt_cache and args.prompt_cache_file:
        raise InputError("give --prompt-cache or --prompt-cache-file, not both.")
    options = _check(args)
    given = given_prompt(args)
    model, tokenizer = loading.load(
        _model_of(args), revision=args.revision, **load_options(args), verbose=True
    )
    quiet_unless_first(model)
    hint_speed(model)
    traced = args.trace and model.runtime.leads
    tracing = model.trace(args.trace) if traced else contextlib.nullcontext()
    with model, tracing, prompt_cache(args) as known:
        text_given = DEFAULT_PROMPT if given is None else given
        prompt, options = _prompt(args, text_given, options, tokenizer)
        if args.prompt_cache_file:
            known = model.make_cache()
            known.load(args.prompt_cache_file)
            prompt = rest_of_prompt(prompt, options, tokenizer)
        last: Any = None
        with instrument(args, model), Bar("prompt", "tok") as bar, Trying() as trying:
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
            if given is None and isinstance(prompt, str):
                print(prompt, end="")
            for last in stream:
                trying.end()
                print(last.text, end="", flush=True)
        print(flush=True)
        if args.stats and model.runtime.leads:
            written = 0
            if isinstance(known, PromptCache):
                known.flush()
                written = known.bytes_written
            table = stats_table(last.experts, model, details=args.details, written=written)
            print(table, file=sys.stderr)
        if args.verbose and model.runtime.leads:
            print(text.summary(last), file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> dict[str, Any]:
    """Check the options of a reply before loading, and return the template's variables.

    Raises:
        InputError: An option is out of range, or a text is not UTF-8.
    """
    from mlx_moeflux.generation.sampling import choose_sampling
    from mlx_moeflux.generation.text import check_numbers, stop_texts

    check_numbers(args.max_tokens, args.prefill_step_size, args.seed)
    choose_sampling(None, None, given_sampling(args, SAMPLING_FIELDS))
    for flag in ("--system-prompt", "--prefill-response"):
        check_text(flag, getattr(args, flag[2:].replace("-", "_")) or "")
    for flag, texts in (
        ("--stop", stop_texts(args.stop)),
        ("--extra-eos-token", args.extra_eos_token),
    ):
        for text in texts:
            check_text(flag, text)
    prompt_cache_limit(args)
    trace_file(args)
    if args.trace is not None and not Path(args.trace).absolute().parent.is_dir():
        raise InputError(f"--trace {args.trace} cannot be written: there is no such directory.")
    return template_options(args)


def _model_of(args: argparse.Namespace) -> Any:
    if args.prompt_cache_file:
        from mlx_moeflux.cache.state.sequence import read_notes

        kept = read_notes(args.prompt_cache_file).get("model")
        args.model = kept if args.model is None else args.model
    return model_or_bundled(args, "give a prompt with --prompt")


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
    kept = kept_by_xtc(tokenizer, vocabulary)
    return {**given_sampling(args, SAMPLING_FIELDS), "xtc_special_tokens": kept}


def _prompt(
    args: argparse.Namespace, text: str, options: dict[str, Any], tokenizer: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the prompt `text` as text or messages, and the template's variables: `options` and
    what the prompt adds."""
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
        options = {**options, "continue_final_message": True}
    return messages, options


def _extra_ends(tokens: Sequence[str], tokenizer: Any) -> list[int]:
    """Return ids of tokens given as text or, as in mlx-lm, as ids."""
    ids = [
        int(t) if t.isdecimal() and len(t) < 10 else tokenizer.convert_tokens_to_ids(t)
        for t in tokens
    ]
    if None in ids:
        raise InputError(f"--extra-eos-token {tokens[ids.index(None)]!r} is not in the vocabulary.")
    return ids


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "t", "f"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1", "t")
