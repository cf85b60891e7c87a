"""``mlx_moeflux chat``: hold a conversation; replies on stdout, everything else on stderr.

On a terminal with the extra ``chat``, :mod:`~mlx_moeflux.cli.chat_terminal` reads lines and shows
replies; otherwise :class:`~mlx_moeflux.cli.chat_frontend.PlainFrontend` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_moeflux.awake import Awake
from mlx_moeflux.cli import signals
from mlx_moeflux.cli.chat_frontend import Frontend, PlainFrontend, Reply
from mlx_moeflux.cli.common import (
    LOADING,
    PROMPT_SHARE,
    RANKS,
    add_cache_arguments,
    add_load_arguments,
    add_memory_arguments,
    add_model_arguments,
    add_sampling_arguments,
    add_stats_arguments,
    check_text,
    given_sampling,
    hint_speed,
    kept_by_xtc,
    load_options,
    memory_pressure,
    model_or_bundled,
    prompt_cache,
    prompt_cache_limit,
    quiet_unless_first,
    refuse,
    stats_table,
    template_options,
    with_standard_input,
)
from mlx_moeflux.cli.messages import Trying, say
from mlx_moeflux.errors import InputError, MoefluxError
from mlx_moeflux.server.reasoning import REASONING, choose_reasoning

if TYPE_CHECKING:
    from mlx_moeflux.models.protocol import LoadedModel

WAITS = True
SAMPLING = ("temp", "top_p", "xtc_probability", "xtc_threshold")
REFUSED = ("--adapter-path", "--max-kv-size", "--pipeline", "--trust-remote-code")
# Command -> its argument and what it does.
COMMANDS = {
    "/help": ("", "show this list"),
    "/reset": ("", "forget the conversation"),
    "/undo": ("", "forget the last question and its reply"),
    "/system": ("TEXT", "set the system message; without a text, remove it"),
    "/save": ("FILE", "write the conversation"),
    "/load": ("FILE", "go on with a saved conversation"),
    "/stats": ("", "show what the experts did in the last reply"),
    "/quit": ("", "leave"),
}
# mlx-lm's names.
SHORT = {"h": "/help", "r": "/reset", "q": "/quit"}
HELP = "\n".join(
    [f"{f'{name} {argument}':<14} {what}" for name, (argument, what) in COMMANDS.items()]
    + ["h, r and q are short for /help, /reset and /quit."]
)
ROLES = ("system", "user", "assistant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("question", nargs="?", metavar="QUESTION", help="answer only this, and end")
    add("--system-prompt", help="system message")
    add("--chat-template-config", default="{}", help="JSON object of template variables")
    add("--max-tokens", "-m", type=int, default=256, help="of a reply, default %(default)s")
    add_sampling_arguments(parser, *SAMPLING)
    add("--seed", type=int, default=0, help="of the draws, default %(default)s")
    add("--hide-thinking", action="store_true", help="show what follows </think> only")
    add_memory_arguments(parser)
    add("--prefill-step-size", type=int, help="tokens a call (default: the whole prompt)")
    add_cache_arguments(parser)
    add_load_arguments(parser, *LOADING)
    add_stats_arguments(parser)
    add_load_arguments(parser, *RANKS)
    refuse(parser, REFUSED)


def run(args: argparse.Namespace) -> int:
    with Awake(allow_sleep=args.allow_sleep) as awake:
        return _run(args, awake)


def _run(args: argparse.Namespace, awake: Awake) -> int:
    import mlx.core as mx

    from mlx_moeflux import loading
    from mlx_moeflux.generation.elastic import elastic_banks

    options = template_options(args)
    _check(args)
    question = None if args.question is None else with_standard_input(args, args.question)
    model, tokenizer = loading.load(
        model_or_bundled(args, "give MODEL before QUESTION"),
        revision=args.revision,
        **{**load_options(args), "reserved_memory": PROMPT_SHARE},
        verbose=True,
    )
    quiet_unless_first(model)
    hint_speed(model)
    notes: list[str] = []
    elastic = elastic_banks(model.runtime, memory_pressure(args), notes.append)
    assert model.plan is not None  # a loaded model has one
    with model, _cache(args, model.plan.reserved_bytes) as cache:
        mx.random.seed(args.seed % 2**64)
        frontend = make_frontend(args, quiet=not model.runtime.leads)
        conversation = Conversation(args, model, tokenizer, cache, options, frontend, elastic)
        if question is not None:
            conversation.turn(question)
            return 0
        if tokenizer.chat_template is None:
            frontend.note("the model has no chat template, so it continues your text")
        frontend.note("/help lists the commands, /quit leaves")
        for line in _lines(frontend, model, awake, args, elastic):
            while notes:
                frontend.note(notes.pop(0))
            if not conversation.take(line):
                break
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check the options of a reply before loading.

    Raises:
        InputError: An option is out of range, or a text is not UTF-8.
    """
    from mlx_moeflux.generation.idle import check_idle_release
    from mlx_moeflux.generation.sampling import make_sampler
    from mlx_moeflux.generation.text import check_numbers

    check_text("--system-prompt", args.system_prompt or "")
    check_text("QUESTION", args.question or "")
    prompt_cache_limit(args)
    check_numbers(args.max_tokens, args.prefill_step_size, args.seed)
    check_idle_release(args.idle_release)
    make_sampler(**given_sampling(args, SAMPLING))


class Conversation:
    """Messages of a conversation; `cache` keeps the states after them, and `elastic` shrinks the
    model's banks between two tokens."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: LoadedModel,
        tokenizer: Any,
        cache: Any,
        options: Any,
        frontend: Frontend,
        elastic: Any = None,
    ):
        self._elastic = elastic
        self._args, self._model, self._tokenizer = args, model, tokenizer
        self._cache, self._options, self.frontend = cache, options, frontend
        self._last: Any = None
        self.messages: list[dict[str, str]] = []
        self._set_system(args.system_prompt)

    def take(self, line: str) -> bool:
        """Run a command or reply to a line; return False to leave."""
        text = line.strip()
        name, _, argument = SHORT.get(text, text).partition(" ")
        if name == "/quit":
            return False
        try:
            if name in COMMANDS:
                self._carry_out(name, argument.strip())
            elif name.startswith("/") and name[1:].isalpha():
                raise InputError(f"there is no command {name[:40]}; /help lists them.")
            elif text:
                self.turn(line)
        except MoefluxError as error:
            say("error", error)
        return True

    def turn(self, query: str) -> None:
        """Show a reply to `query`.

        Ctrl-C ends it and keeps its text; without any text the query is forgotten.

        Raises:
            MoefluxError: Such as a full context; the query is forgotten.
        """
        self.messages.append({"role": "user", "content": query})
        try:
            reply = self._answer()
        except MoefluxError:
            del self.messages[-1]
            raise
        if self._last is None:
            del self.messages[-1]
            return
        self.messages.append({"role": "assistant", "content": reply})
        if self._args.stats:
            self._show_stats()

    def _carry_out(self, name: str, argument: str) -> None:
        if name in ("/save", "/load") and not argument:
            raise InputError(f"{name} needs the name of a file.")
        if name == "/help":
            self.frontend.note(f"{HELP}\n{self.frontend.keys}")
        elif name == "/reset":
            self.messages = [m for m in self.messages if m["role"] == "system"]
            self.frontend.note("the conversation is forgotten")
        elif name == "/undo":
            self._undo()
        elif name == "/system":
            self._set_system(argument)
            self.frontend.note("the system message is set" if argument else "no system message")
        elif name == "/save":
            save_conversation(Path(argument).expanduser(), self.messages)
            self.frontend.note(f"written to {argument}")
        elif name == "/load":
            self.messages = load_conversation(Path(argument).expanduser())
            self.frontend.note(f"{len(self.messages)} messages")
        elif name == "/stats":
            self._show_stats()

    def _set_system(self, text: str | None) -> None:
        rest = [m for m in self.messages if m["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def _undo(self) -> None:
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not asked:
            raise InputError("there is nothing to undo.")
        del self.messages[asked[-1] :]
        self.frontend.note("the last question and its reply are forgotten")

    def _show_stats(self) -> None:
        experts = None if self._last is None else self._last.experts
        if experts is None:
            self.frontend.note("the last reply has no statistics")
            return
        self._cache.flush()
        written, details = self._cache.bytes_written, self._args.details
        self.frontend.note(stats_table(experts, self._model, details=details, written=written))

    def _answer(self) -> str:
        """Show a reply and return its text; `_last` is None if none of it came."""
        text, self._last = "", None
        syntax = choose_reasoning(self._tokenizer) or REASONING["think"]
        opened, markdown = self._opens_thinking(), self._tokenizer.chat_template is not None
        reply = self.frontend.reply(syntax.splitter(opened=opened), markdown=markdown)
        with reply as shown, Trying(self.frontend.note) as trying:
            stream = self._stream(shown)
            try:
                with contextlib.closing(stream):
                    for self._last in stream:
                        trying.end()
                        text += self._last.text
                        shown.add(self._last.text)
                        if self._elastic is not None:
                            self._elastic.look()
            except KeyboardInterrupt as interrupt:
                if self._args.distributed or self._args.question is not None:
                    raise  # the other ranks are in the middle of it, or nothing is to follow
                signals.handled(interrupt)
                shown.interrupted()
            shown.end(self._last)
        if syntax is REASONING["think"]:  # templates leave it out themselves
            return text
        return syntax.splitter(opened=opened).add(text, final=True).content

    def _stream(self, shown: Reply) -> Generator[Any, None, None]:
        from mlx_moeflux.generation import text

        args, tokenizer = self._args, self._tokenizer
        return text.stream_generate(
            self._model,
            tokenizer,
            self._prompt(),
            max_tokens=args.max_tokens,
            template_options=self._options,
            prompt_cache=self._cache,
            prefill_step_size=args.prefill_step_size,
            prompt_progress_callback=shown.progress,
            **given_sampling(args, SAMPLING),
            xtc_special_tokens=kept_by_xtc(tokenizer, self._model.config.vocab_size),
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
        return text.rstrip().endswith(REASONING["think"].open)


def save_conversation(file: Path, messages: Sequence[dict[str, str]]) -> None:
    """Write messages to a file that is new or holds a conversation.

    Raises:
        InputError: It holds something else, or cannot be written.
    """
    from mlx_moeflux.checkpoint.files import write_output

    if file.exists():
        load_conversation(file)
    text = json.dumps({"messages": list(messages)}, ensure_ascii=False, indent=1)
    write_output(file, text.encode() + b"\n")


def load_conversation(file: Path) -> list[dict[str, str]]:
    """Return the messages of a file that :func:`save_conversation` wrote.

    Raises:
        InputError: It cannot be read, or holds something else.
    """
    from mlx_moeflux.checkpoint.files import read_json_object

    messages = read_json_object(file, error=InputError).get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InputError(f"{file} holds no conversation; give a file that /save wrote.")
    return messages


def _is_message(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == {"role", "content"}
        and found["role"] in ROLES
        and isinstance(found["content"], str)
    )


def make_frontend(args: argparse.Namespace, *, quiet: bool = False) -> Frontend:
    """Return the front end for this terminal; the plain one without a terminal or the extra, which
    shows notes unless `quiet`."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            from mlx_moeflux.cli.chat_terminal import TerminalFrontend

            return TerminalFrontend(COMMANDS, hidden=args.hide_thinking)
    return PlainFrontend(hidden=args.hide_thinking, quiet=quiet)


@contextlib.contextmanager
def _cache(args: argparse.Namespace, memory_bytes: int) -> Iterator[Any]:
    from mlx_moeflux.cache.prompt.cache import PromptCache

    options = {"replies": True, "memory_bytes": max(memory_bytes, 1)}
    with prompt_cache(args, **options) as on_disk:
        yield PromptCache(**options) if on_disk is None else on_disk


def _lines(
    frontend: Frontend, model: LoadedModel, awake: Awake, args: argparse.Namespace, elastic: Any
) -> Iterator[str]:
    from mlx_moeflux.generation.idle import released_when_idle

    while True:
        if not args.distributed:  # a rank that sleeps is lost to the others
            awake.rest()
        try:
            with released_when_idle(model, args.idle_release, elastic):
                line = frontend.line()
        except EOFError:
            return
        awake.work()
        yield line
