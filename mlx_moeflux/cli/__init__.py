"""The command line: one module per command, mlx-lm's names and flags where they mean the same."""

from __future__ import annotations

import argparse
import codecs
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from mlx_moeflux._version import __version__
from mlx_moeflux.cli import signals
from mlx_moeflux.cli.messages import say
from mlx_moeflux.cli.parser import Parser, suggestion
from mlx_moeflux.errors import MoefluxError, UnsupportedError

# Command -> purpose. Its module in this package has add_arguments(parser) and run(args), and
# NEEDS_MLX = False if it runs without an MLX back end. One that needs it keeps a Mac awake until it
# ends, or itself decides when if WAITS = True: it waits for its users.
COMMANDS = {
    "generate": "generate text from a prompt",
    "chat": "chat with a model",
    "serve": "serve the protocols of OpenAI and Anthropic over HTTP",
    "cache_prompt": "process a prompt once, for later calls of generate",
    "convert": "write a checkpoint in another layout or quantisation",
    "check": "compare operations with exact results on this machine, or a model with mlx-lm",
    "synthesize": "write a checkpoint of random weights in a published shape",
    "shapes": "list the published shapes for synthesize and benchmark",
    "trace": "draw or replay what generate --trace wrote",
    "models": "list the known models that run on this machine",
    "plan": "predict whether a model fits and how fast it can be",
    "tune": "find the memory and threads that suit this machine",
    "compare-quality": "compare a lossy option with the exact model",
    "perplexity": "measure perplexity on a text file",
    "evaluate": "run tasks of lm-evaluation-harness",
    "policies": "list eviction and prefetch policies",
    "benchmark": "measure speed and memory, and their limits",
    "report": "check and measure this machine, for whoever maintains the package",
    "completion": "print a script that completes commands and options in a shell",
}


# Another name of a command, mlx-lm's or one that people type -> ours.
ALIASES = {"server": "serve", "run": "chat"}


def _own_name(command: str) -> str:
    return ALIASES.get(command, command)


def _description(command: str) -> str:
    purpose = COMMANDS[_own_name(command)]
    return f"{purpose[0].upper()}{purpose[1:]}."


def command_module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_own_name(name).replace('-', '_')}")


class Version(argparse.Action):
    """Prints the version, the back end and the device."""

    def __init__(self, option_strings, dest, **_):
        super().__init__(option_strings, dest, nargs=0, help="print version, back end and device")

    def __call__(self, parser, namespace, values, option_string=None):
        from mlx_moeflux.backend import describe_backend

        try:
            backend = describe_backend()
        except UnsupportedError:
            backend = "no MLX back end"
        print(f"mlx_moeflux {__version__} ({backend})")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``mlx_moeflux COMMAND ...`` and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return _guarded(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    command = _own_name(arguments[0]) if arguments else ""
    parser = make_parser(command)
    if command and not command.startswith("-") and command not in COMMANDS:
        hint = suggestion(command, [*COMMANDS, *ALIASES])
        parser.error(
            f"there is no command '{command}'{hint or '; there are ' + ', '.join(COMMANDS)}"
        )
    if command.startswith("--") and set(arguments) & {*COMMANDS, *ALIASES}:
        parser.error(f"{command} stands before the command; give options after it")
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    return _run_command(args.command, args)


def make_parser(*chosen: str) -> Parser:
    """Return the parser of all commands, with the options of those `chosen`."""
    parser = Parser(
        prog="mlx_moeflux",
        description="Mixture-of-Experts models larger than memory, on MLX.",
        elsewhere=_commands_with,
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(
            name,
            aliases=[alias for alias, other in ALIASES.items() if other == name],
            help=purpose,
            description=_description(name),
        )
        if name in chosen:
            _add_arguments(command, name)
    return parser


def _commands_with(flag: str) -> list[str]:
    """Return the commands that have an option of this name of their own."""
    found = []
    for name in COMMANDS:
        parser = Parser(add_help=False)
        command_module(name).add_arguments(parser)
        if any(flag in action.option_strings for action in parser.shown_actions()):
            found.append(name)
    return found


def script() -> int:
    """Run the script ``mlx_moeflux.COMMAND`` that was called, and return the exit status."""
    program = Path(sys.argv[0]).name
    command = program.removeprefix("mlx_moeflux.")

    def run() -> int:
        parser = Parser(prog=program, description=_description(command), elsewhere=_commands_with)
        _add_arguments(parser, command)
        return _run_command(command, parser.parse_args())

    return _guarded(run)


def _add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    from mlx_moeflux.cli.common import add_sleep_argument

    module = command_module(command)
    module.add_arguments(parser)
    if getattr(module, "NEEDS_MLX", True):
        add_sleep_argument(parser)


def _run_command(name: str, args: argparse.Namespace) -> int:
    from mlx_moeflux.awake import Awake
    from mlx_moeflux.backend import require_mlx, set_device_variables

    module = command_module(name)
    if getattr(module, "NEEDS_MLX", True):
        with signals.held():
            require_mlx()
    set_device_variables()
    own = getattr(module, "WAITS", False)
    with Awake(allow_sleep=own or getattr(args, "allow_sleep", True)):
        return module.run(args) or 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    say("warning", message)


def _guarded(action: Callable[[], int]) -> int:
    """Return the exit status of `action`; errors and warnings become one line on stderr each."""
    _open_closed_streams()
    try:
        with signals.raised(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = action()
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001
        status = signals.status() or _report(error)
    finally:
        if signals.status() == signals.HUNG_UP:
            # Whoever reads the log did not send it.
            say("error", "SIGHUP ended the command: its terminal or session was closed.")
        _discard_unwritable()
    return (signals.status() or status) if status else 0


def _report(error: BaseException) -> int:
    """Return the exit status of an error and say it in one line, or raise it if it is a fault of
    ours."""
    if isinstance(error, MoefluxError):
        say("error", error)
        return 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        # The reader closed stdout.
        return 0
    if isinstance(error, UnicodeEncodeError) and _is_of_stdout(error.encoding):
        mend = "utf-8:surrogateescape" if _is_of_stdout("utf-8") else "utf-8"
        character = f"U+{ord(error.object[error.start]):04X}"
        message = f"the output cannot have {character} in {error.encoding}"
        say("error", MoefluxError(f"{message}; set PYTHONIOENCODING={mend}."))
        return 1
    if isinstance(error, OSError):
        # Commands name the files that they cannot read or write; left are the standard streams.
        what = error.filename if error.filename is not None else "the output"
        reason = error.strerror or error
        say("error", MoefluxError(f"{what} cannot be read or written: {reason}."))
        return 1
    raise error


def _is_of_stdout(encoding: str) -> bool:
    return codecs.lookup(encoding) == codecs.lookup(sys.stdout.encoding or "utf-8")


def _open_closed_streams() -> None:
    """Replace closed standard streams.

    Otherwise the next file that is opened becomes stdout, and ``print(file=sys.stderr)`` writes to
    stdout. Messages to a closed stderr are dropped. Writing to a closed stdout fails, because the
    result of the command would be lost.
    """
    for name, descriptor, flags in (
        ("stdin", 0, os.O_RDONLY),
        ("stdout", 1, os.O_RDONLY),
        ("stderr", 2, os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, flags)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _discard_unwritable() -> None:
    """Drop what stdout and stderr cannot write. Otherwise Python's flush at exit fails again, and
    the exit status is 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
