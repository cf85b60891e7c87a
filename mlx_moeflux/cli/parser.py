"""The parser of every command, and what it says of a command line that is wrong."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from mlx_moeflux.errors import InputError

# A word that gives an option ``--`` as its value.
_NO_VALUE = re.compile(r"(--[\w-]+)=--|(-[A-Za-z])=?--")

# Input of which the first would be lost.
ONCE = ("model", "prompt")
# So many options that begin with a word are named; of more, none.
MOST_NAMED = 4


class Once(argparse._StoreAction):
    """Stores the value of an option or of a place; one of both, and of
    :data:`ONCE` no second one."""

    def __call__(self, parser, namespace, values, option_string=None):
        assert isinstance(parser, Parser)
        if not self.option_strings and values is self.default:
            return  # an empty place
        first = parser.given.setdefault(self.dest, self)
        if first is not self:
            option, place = (first, self) if first.option_strings else (self, first)
            name = place.metavar or place.dest
            raise InputError(f"give {name} or {option.option_strings[0]}, not both.")
        # Of other options the last value counts: it overrides an alias of the shell.
        if self in parser.stored and self.dest in ONCE:
            raise InputError(f"{option_string} is given twice; give it once.")
        parser.stored.append(self)
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """Parser that takes whole names of options, with values that are not empty.

    ``--`` as the value of an option, which argparse turns into no value, is refused. An option that
    is misspelt gets a suggestion. Words go to places wherever they stand between options.

    elsewhere: Returns the commands that have an option of a name.
    """

    # The action that gave each destination its value, and all actions that have one.
    given: dict[str, argparse.Action]
    stored: list[argparse.Action]

    def __init__(self, *, elsewhere: Callable[[str], Sequence[str]] = lambda flag: (), **options):
        super().__init__(allow_abbrev=False, **options)
        self._elsewhere = elsewhere
        for name in (None, "store"):
            self.register("action", name, Once)

    def parse_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            command = getattr(found, "command", None)
            instead = f"; see {' '.join(filter(None, (self.prog, command)))} --help"
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._hint(rest) or instead}")
        return found

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.given, self.stored = {}, []
        # Python 3.13 takes ``--flag=--`` as it stands.
        for word in itertools.takewhile(lambda word: word != "--", args or ()):
            if match := _NO_VALUE.fullmatch(word):
                raise InputError(f"{match[1] or match[2]} has no value: -- only ends the options.")
        found, rest = super().parse_known_args(args, namespace)
        rest = self._placed(found, rest)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if value is action.default:
                continue
            by = self.given.get(action.dest, action)
            name = "/".join(by.option_strings) or by.metavar or by.dest
            lost = isinstance(value, list) and (value == [] or [] in value)
            if lost and action.nargs in (None, "+"):
                raise InputError(f"{name} has no value: -- only ends the options.")
            if value == "" or (isinstance(value, list) and "" in value):
                raise InputError(f"{name} is empty; give a value or leave it out.")
        return found, rest

    def _placed(self, found: argparse.Namespace, rest: list[str]) -> list[str]:
        """Give words to places that are empty, and return those that are left.

        Before Python 3.12.7 argparse closes optional places at the first option.
        """
        words = rest[1:] if rest[:1] == ["--"] else rest
        if words is rest and any(word.startswith("-") for word in rest):
            return rest
        for action in self._get_positional_actions():
            if words and action.nargs == "?" and action not in self.stored:
                action(self, found, words[0])
                words = words[1:]
        return words

    def _print_message(self, message, file=None):
        # Early releases of Python 3.11 do not suppress this: the status would be another.
        with contextlib.suppress(OSError):
            super()._print_message(message, file)

    def _hint(self, rest: Sequence[str]) -> str:
        """Return the end of a message about words that nothing takes."""
        actions = self.shown_actions()
        options = [flag for action in actions for flag in action.option_strings]
        places = [action.dest for action in actions if not action.option_strings]
        for flag in (word.partition("=")[0] for word in rest if word.startswith("-")):
            if flag[2:] in places:
                return f"; give the {flag[2:]} without {flag}"
            if commands := self._elsewhere(flag):
                return f"; it is an option of {', '.join(commands)}"
            if hint := suggestion(flag, options):
                return hint
        if "--prompt" in options and not any(word.startswith("-") for word in rest):
            return "; give it with --prompt, in quotes if it has spaces"
        return ""

    def shown_actions(self) -> list[argparse.Action]:
        """Return the options and places that help shows, those of a command included."""
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                actions.remove(action)
                actions += (one for parser in action.choices.values() for one in parser._actions)
        return [action for action in actions if action.help is not argparse.SUPPRESS]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about `word`: which of the `known` words it may stand for.

    These are, in this order: one with at most one wrong letter; those that begin with `word`; the
    longest that `word` begins with; the likeliest, if one is like it.
    """
    known = list(dict.fromkeys(known))
    # Without the dashes, which would make every flag like every other one.
    names = {one.lstrip("-"): one for one in known}
    name = word.lstrip("-").replace("_", "-").lower() if word.startswith("-") else word
    near = difflib.get_close_matches(name, names, n=1)
    slip = [one for one in near if _likeness(name, one) >= 1 - 1 / max(len(name), len(one))]
    whole = [one for one in known if len(name) > 1 and one.lstrip("-").startswith(name)]
    part = sorted((one for one in names if len(one) > 2 and name.startswith(one)), key=len)[-1:]
    if slip:
        return f"; did you mean {names[slip[0]]}?"
    if 0 < len(whole) <= MOST_NAMED:
        return f"; did you mean {' or '.join(whole)}?"
    close = [names[one] for one in part or near]
    return f"; did you mean {close[0]}?" if close else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
