"""``mlx_moeflux chat``: a conversation; replies on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any

from mlx_moeflux.cli import say
from mlx_moeflux.cli.generate import (
    add_cache_arguments,
    add_expert_arguments,
    load_options,
    prompt_cache,
    refuse,
    stats_table,
    template_options,
)
from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.errors import MoefluxError

REFUSED = ("--adapter-path", "--max-kv-size", "--pipeline", "--trust-remote-code")
HELP = "q: quit; r: forget the conversation; h: this help; Ctrl-C: end the reply"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="directory or Hugging Face id (default: the bundled model)")
    add("--system-prompt", help="system message")
    add("--chat-template-config", default="{}", help="JSON object of template variables")
    add("--max-tokens", "-m", type=int, default=256, help="of a reply, default %(default)s")
    add("--temp", type=float, default=0.0, help="default %(default)s: greedy")
    add("--top-p", type=float, default=1.0)
    add("--xtc-probability", type=float, default=0.0)
    add("--xtc-threshold", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--hide-thinking", action="store_true", help="show what follows </think> only")
    add(
        "--idle-release",
        type=float,
        metavar="SECONDS",
        help="free the experts' memory after so long at the prompt; a reply reads them again",
    )
    add("--prefill-step-size", type=int, help="tokens a call (default: the whole prompt)")
    add_cache_arguments(parser)
    add_expert_arguments(parser)
    refuse(parser, REFUSED)


def run(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from mlx_moeflux import loading

    options = template_options(args)
    _check(args)
    model, tokenizer = loading.load(
        args.model or loading.BUNDLED_MODEL, **load_options(args), verbose=True
    )
    with model, _cache(args) as cache:
        mx.random.seed(args.seed % 2**64)
        talk = Conversation(args, model, tokenizer, cache, options)
        print(HELP, file=sys.stderr)
        for line in _lines(model, args.idle_release):
            command = line.strip()
            if command == "q":
                break
            if command == "h":
                print(HELP, file=sys.stderr)
            elif command == "r":
                talk.reset()
                print("the conversation is forgotten", file=sys.stderr)
            elif command:
                talk.turn(line)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check the options of a reply before loading.

    Raises:
        InputError: An option is out of range.
    """
    from mlx_moeflux.generation.idle import check_idle_release
    from mlx_moeflux.generation.sampling import make_sampler
    from mlx_moeflux.generation.text import check_numbers

    check_numbers(args.max_tokens, args.prefill_step_size, args.seed)
    check_idle_release(args.idle_release)
    make_sampler(
        args.temp,
        args.top_p,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
    )


class Conversation:
    """Messages of a conversation; `cache` keeps the states after them."""

    def __init__(self, args: argparse.Namespace, model: Any, tokenizer: Any, cache: Any, options):
        self._args, self._model, self._tokenizer = args, model, tokenizer
        self._cache, self._options = cache, options
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Delete all messages except the system prompt."""
        system = self._args.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []

    def turn(self, query: str) -> None:
        """Print a reply to `query`; Ctrl-C ends it and keeps its text.

        An error, such as a full context, is printed in one line and deletes the query.
        """
        self.messages.append({"role": "user", "content": query})
        try:
            self._answer()
        except MoefluxError as error:
            del self.messages[-1]
            say("error", error)

    def _answer(self) -> None:
        reply, last = "", None
        shown = Thinking(self._opens_thinking(), hidden=self._args.hide_thinking)
        stream = self._stream()
        try:
            with contextlib.closing(stream):
                for last in stream:
                    reply += last.text
                    print(shown.add(last.text), end="", flush=True)
                print(shown.finish(), end="")
        except KeyboardInterrupt:
            print(" ...", end="")
        print(flush=True)
        self.messages.append({"role": "assistant", "content": reply})
        if self._args.stats and last is not None and last.experts is not None:
            print(
                stats_table(last.experts, self._model, details=self._args.details), file=sys.stderr
            )

    def _stream(self) -> Generator[Any, None, None]:
        from mlx_moeflux.generation import text

        args, tokenizer = self._args, self._tokenizer
        kept = [*tokenizer.encode("\n", add_special_tokens=False), *sorted(tokenizer.eos_token_ids)]
        return text.stream_generate(
            self._model,
            tokenizer,
            self._prompt(),
            max_tokens=args.max_tokens,
            template_options=self._options,
            prompt_cache=self._cache,
            prefill_step_size=args.prefill_step_size,
            temp=args.temp,
            top_p=args.top_p,
            xtc_probability=args.xtc_probability,
            xtc_threshold=args.xtc_threshold,
            xtc_special_tokens=kept,
        )

    def _prompt(self) -> Any:
        if self._tokenizer.chat_template is not None:
            return self.messages
        # Without a template the model continues the text of the conversation.
        return "".join(message["content"] for message in self.messages)

    def _opens_thinking(self) -> bool:
        if self._tokenizer.chat_template is None:
            return False
        text = self._tokenizer.apply_chat_template(self.messages, tokenize=False, **self._options)
        return text.rstrip().endswith(OPEN)


OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """Filter of a reply's text that removes text between thinking marks if `hidden`.

    inside: True if the prompt ends with the opening mark.
    """

    def __init__(self, inside: bool, *, hidden: bool):
        self._hidden, self._inside, self._held = hidden, inside, ""

    def add(self, text: str) -> str:
        """Add text and return the part to print now."""
        if not self._hidden:
            return text
        self._held += text
        shown = ""
        while True:
            mark = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            shown += "" if self._inside else before
            self._held, self._inside = after, not self._inside
        held = overlap(self._held, mark)
        ready, self._held = self._held[: len(before) - held], self._held[len(before) - held :]
        return shown if self._inside else shown + ready

    def finish(self) -> str:
        """Return the rest at the end of a reply."""
        rest, self._held = self._held, ""
        return "" if self._inside else rest


@contextlib.contextmanager
def _cache(args: argparse.Namespace) -> Iterator[Any]:
    from mlx_moeflux.cache.prompt.cache import PromptCache

    with prompt_cache(args, replies=True) as on_disk:
        yield PromptCache(replies=True) if on_disk is None else on_disk


def _lines(model: Any, idle_release: float | None) -> Iterator[str]:
    from mlx_moeflux.generation.idle import released_when_idle

    while True:
        try:
            with released_when_idle(model, idle_release):
                line = input(">> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        yield line


def main() -> int:
    """Run the script ``mlx_moeflux.chat``."""
    from mlx_moeflux.cli import run_command

    return run_command("chat")
