"""Parsers of calls: from the text of a reply behind the begin of calls to parts of calls, while it
comes.

A text between tags is handed out as it comes, and so is JSON. Every other value between tags waits
until it is whole, as its type follows from all of it. The last brace of the arguments waits until
the call is whole: what was handed out before is no JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.json_guard import MOST_DEPTH, ObjectEnd, read_json
from mlx_moeflux.server.schemas import ANY, TEXT, ArgumentsSchema

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a function -> JSON schema of its arguments."""


@dataclass(frozen=True)
class CallPart:
    """A part of a call of a function; the parts of a call come in order, not mixed with others'.

    name, id: On the first part. Parsers give the model's id, or None.
    arguments: Further JSON text of an object; the first part has its first brace at least.
    whole: On the last part. What has no such part is no call.
    index: Number of the call in the reply, from 0; parsers leave it at 0.
    """

    name: str = ""
    arguments: str = ""
    id: str | None = None
    whole: bool = False
    index: int = 0

    def __add__(self, other: CallPart) -> CallPart:
        """Return this part and the next one of the same call as one."""
        arguments = self.arguments + other.arguments
        return replace(self, arguments=arguments, whole=other.whole)


def whole_calls(parts: Iterable[CallPart]) -> list[CallPart]:
    """Return the calls of a reply, each as one part; what is no whole call is left out."""
    calls: dict[int, CallPart] = {}
    for part in parts:
        calls[part.index] = calls[part.index] + part if part.index in calls else part
    return [call for call in calls.values() if call.whole]


Parser = Iterator["CallPart | None"]
"""Yields parts of calls, and None to wait for more text; ends behind the last call."""
Parts = Generator["CallPart | None", None, None]
Waiting = Generator[None, None, str]

_CLOSE = CallPart(arguments="}", whole=True)
MOST_NAME = 300


class Reader:
    """The text of a reply behind the begin of calls, as a parser reads it.

    Its methods wait (yield) while the text is too short, and raise ValueError once nothing that
    may follow can be what they look for. text: All that there is; it grows. at: Place up to which
    it is read. begun: A mark or a brace of a call was read. ended: The model ended the reply
    itself, so no more text comes.
    """

    def __init__(self, text: str):
        self.text, self.at, self.begun, self.ended = text, 0, False, False

    def take(self, *marks: str, optional: bool = False) -> Waiting:
        """Read white space and one of `marks`, the first that stands there; return it.

        optional: The last one may be missing at the end of a reply that the model ended itself.
        """
        while True:
            self.at = self._behind_space(self.at)
            rest = self.text[self.at : self.at + max(map(len, marks))]
            for mark in marks:
                if rest.startswith(mark):
                    self.at, self.begun = self.at + len(mark), True
                    return mark
                if mark.startswith(rest):
                    break  # it may still come
            else:
                raise ValueError(f"no {marks}")
            if optional and self.ended and not rest:
                return marks[-1]
            yield

    def name(self, mark: str) -> Waiting:
        """Read a name of one line that stands before `mark`, which stays; return it."""
        place = self.at
        while True:
            end = self.text.find(mark, place)
            if end < 0 and self.ended:
                end = len(self.text)
            place = end if end >= 0 else max(place, len(self.text) - len(mark) + 1)
            name = self.text[self.at : place].strip()
            if "\n" in name or len(name) > MOST_NAME or (end >= 0 and not name):
                raise ValueError("no name")
            if end >= 0:
                self.at = end
                return name
            yield

    def next(self) -> Waiting:
        """Read white space; return the character behind it, "" at the end of the reply."""
        while True:
            self.at = self._behind_space(self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            yield

    def arguments(self, name: str, id: str | None = None) -> Generator[CallPart | None, None, str]:
        """Read white space and a JSON object, the arguments of a call; return its text.

        Yields all of it but the last brace as parts of a call of `name`.
        """
        yield from self.take("{")
        begin, sent = self.at - 1, self.at
        scanner = ObjectEnd(begin)
        yield CallPart(name, "{", id)
        while True:
            end = scanner.find(self.text)
            certain = len(self.text) if end is None else end - 1
            if certain > sent:
                yield CallPart(arguments=self.text[sent:certain])
                sent = certain
            if end is not None:
                break
            yield None
        text, self.at = self.text[begin:end], end
        read_json(text)
        return text

    def value(
        self, mark: str, *rows: tuple[str, ...], shown: bool, lines: Callable[[str], bool] | None
    ) -> Generator[CallPart | None, None, str]:
        """Read up to `mark` with the marks of one of `rows` behind it; return the text before.

        shown: Yield what is certain of the text as parts of a JSON string. lines: A line break
        belongs to the tags on both sides, as in Qwen's calls, and the text may also end before
        the tag of another argument, a name for which `lines` is true.
        """
        start = certain = place = sent = self.at
        while True:
            place, ends = self._end(place, mark, rows)
            behind, stripped = place + len(mark), lines is not None
            certain, found = self._next_tag(certain, place, lines) if lines else (place, False)
            if found:
                ends, behind, stripped = True, certain + 1, False
            elif ends:
                certain = place
            begin = start + (lines is not None and self.text.startswith("\n", start, certain))
            stripped = stripped and ends and self.text.endswith("\n", begin, certain)
            sent, end = max(sent, begin), certain - stripped
            if shown and end > sent:
                yield CallPart(arguments=_inner(self.text[sent:end]))
                sent = end
            if ends:
                self.at = behind
                return self.text[begin:end]
            yield None

    def _end(self, place: int, mark: str, rows: tuple[tuple[str, ...], ...]) -> tuple[int, bool]:
        """Return the next place where a value may end, and whether it certainly does."""
        while (end := self.text.find(mark, place)) >= 0:
            found = [self._stand(end + len(mark), row) for row in rows]
            if True in found or None in found:
                return end, True in found
            place = end + len(mark)
        return max(place, len(self.text) - overlap(self.text, mark)), False

    def _next_tag(self, begin: int, end: int, lines: Callable[[str], bool]) -> tuple[int, bool]:
        """Return the place of the next tag of an argument on a line of its own, and True; the
        place where one may still begin, and False."""
        for found in _XML_ARGUMENT.finditer(self.text, begin, end):
            if lines(found[1]):
                return found.start(), True
        last = self.text.rfind("\n", begin, end)
        rest = self.text[last:end] if last >= 0 else "-"
        may_be = "\n<parameter=".startswith(rest) or _XML_BEGUN.fullmatch(rest)
        return (last if may_be else end), False

    def _behind_space(self, at: int) -> int:
        space = _SPACE.match(self.text, at)
        assert space is not None
        return space.end()

    def _stand(self, at: int, row: tuple[str, ...]) -> bool | None:
        """Return True if marks stand at a place, in this order, and None if they still may."""
        for mark in row:
            at = self._behind_space(at)
            if self.text.startswith(mark, at):
                at += len(mark)
            elif not mark.startswith(self.text[at : at + len(mark)]):
                return False
            else:
                return True if self.ended and at == len(self.text) else None
        return True


_SPACE = re.compile(r"\s*")
_XML_ARGUMENT = re.compile(r"\n<parameter=([^>\n]+)>(?=\n)")
_XML_BEGUN = re.compile(r"\n<parameter=[^>\n]+>?")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _inner(text: str) -> str:
    """Return a text as it stands inside a JSON string."""
    return _json(text)[1:-1]


CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
MINIMAX, MINIMAX_END, INVOKE = "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="'
DSML = "｜DSML｜"
DSML_CALLS, DSML_CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
DSML_INVOKE = f'<{DSML}invoke name="'
DEEPSEEK, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_SECTION, KIMI_SECTION_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
KIMI_CALL = "<|tool_call_begin|>"
HARMONY_END = "<|call|>"
GEMMA, GEMMA_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def parse_json_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``{"name": ..., "arguments": {...}}``, as Hermes and Qwen3 write it."""
    begin, end, whole = reader.at, None, ObjectEnd(reader.at)
    while (head := _JSON_HEAD.match(reader.text, begin)) is None:
        if (end := whole.find(reader.text)) is not None:
            break
        yield None
    reader.begun, name, text = True, None, None
    if head is not None:
        name, reader.at = read_json(head[1]), head.end()
        text = yield from reader.arguments(name)
        while end is None and (end := whole.find(reader.text)) is None:
            yield None
    call, reader.at = read_json(reader.text[begin:end]), end or begin
    given = call.get("arguments", call.get("parameters", {}))
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError("no name")
    if text is None:
        text = given if isinstance(given, str) else _json(given)
        if not isinstance(read_json(text), dict):
            raise ValueError("arguments are no object")
        first = CallPart(call["name"], text.strip()[:-1])
    elif (call["name"], given) != (name, read_json(text)):
        raise ValueError("two names, or arguments twice")
    else:
        first = None
    yield from reader.take(CALL_END, optional=True)
    if first is not None:
        yield first
    yield _CLOSE


def parse_xml_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse ``<function=name><parameter=key>value</parameter></function>``, as Qwen3.5 and
    Qwen3-Coder write it. The model may leave out the marks between two calls."""
    argument, end = "<parameter=", "</function>"
    rows = (argument,), (end, CALL_END), (end, FUNCTION)
    mark = FUNCTION
    while mark == FUNCTION:
        yield from reader.take(FUNCTION)
        call = _TaggedCall((yield from reader.name(">")), tools)
        yield from reader.take(">")
        while (yield from reader.take(argument, end)) == argument:
            key = yield from reader.name(">")
            yield from reader.take(">")
            yield from call.argument(reader, key, "</parameter>", *rows, lines=True)
        mark = yield from reader.take(FUNCTION, CALL_END, optional=True)
        if mark == FUNCTION:
            reader.at -= len(FUNCTION)
        yield from call.end()


def parse_glm_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``name<arg_key>key</arg_key><arg_value>value</arg_value>``, as GLM-4.5 to 4.7 write it,
    with line breaks or without. Only its end and the schema tell that such a call is whole."""
    call = _TaggedCall((yield from reader.name("<")), tools)
    while (yield from reader.take("<arg_key>", CALL_END, optional=call.has_all)) == "<arg_key>":
        key = yield from reader.name("</arg_key>")
        yield from reader.take("</arg_key>")
        yield from reader.take("<arg_value>")
        yield from call.argument(reader, key, "</arg_value>", ("<arg_key>",), (CALL_END,))
    yield from call.end()


def parse_minimax_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse ``<invoke name="name"><parameter name="key">value</parameter></invoke>``, as MiniMax-M2
    writes it."""
    return _parse_invoked(reader, tools, "", MINIMAX_END, {'">': None})


def parse_dsml_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse the same with ``｜DSML｜`` before the name of each tag and ``string="true"`` or
    ``"false"`` behind each key, as DeepSeek-V3.2 writes it: a text, or JSON.

    Source: the `encoding_dsv32.py` beside DeepSeek-V3.2, as mlx-lm 0.32.2 has it.
    """
    kinds = {'" string="true">': True, '" string="false">': False}
    return _parse_invoked(reader, tools, DSML, DSML_CALLS_END, kinds)


def _parse_invoked(
    reader: Reader, tools: Tools, prefix: str, last: str, kinds: Mapping[str, bool | None]
) -> Parser:
    """Parse calls between ``invoke`` tags up to the mark `last`.

    kinds: Mark behind a key -> whether the value is a text; None leaves it to the schema.
    """
    invoke, argument = f'<{prefix}invoke name="', f'<{prefix}parameter name="'
    end, close = f"</{prefix}invoke>", f"</{prefix}parameter>"
    rows = (argument,), (end, invoke), (end, last)
    while (yield from reader.take(invoke, last, optional=True)) == invoke:
        call = _TaggedCall((yield from reader.name('"')), tools)
        yield from reader.take('">')
        while (yield from reader.take(argument, end)) == argument:
            key = yield from reader.name('"')
            text = kinds[(yield from reader.take(*kinds))]
            yield from call.argument(reader, key, close, *rows, text=text)
        yield from call.end()


_NO_TEXT = {"type": sorted(ANY - TEXT)}


class _TaggedCall:
    """A call whose arguments stand between tags; its schema says what they are."""

    def __init__(self, name: str, tools: Tools):
        self._name, self._known = name, name in tools
        self._schema = ArgumentsSchema(tools.get(name, {}))
        self._keys: set[str] = set()

    @property
    def has_all(self) -> bool:
        """Return True if the function is known and no argument that it requires is missing."""
        return self._known and self._schema.required() <= self._keys

    def argument(
        self,
        reader: Reader,
        key: str,
        mark: str,
        *rows: tuple[str, ...],
        lines: bool = False,
        text: bool | None = None,
    ) -> Parts:
        """Read the value of an argument, see :meth:`Reader.value`. text: The call says whether it
        is a text; None leaves it to the schema, which may also make a text of what is none."""
        schema = self._schema.argument(key)
        shown = text or self._schema.types(schema) == TEXT
        if text is False:
            schema = _NO_TEXT
        head = f"{_json(key)}: "
        begun = CallPart(arguments=", ") if self._keys else CallPart(self._name, "{")
        self._keys.add(key)
        begun += CallPart(arguments=head + '"' * shown)
        if shown:
            yield begun
        expects = self._expects if lines else None
        value = yield from reader.value(mark, *rows, shown=shown, lines=expects)
        if shown:
            yield CallPart(arguments='"')
        else:
            yield begun + CallPart(arguments=_json(self._schema.value(value, schema)))

    def end(self) -> Parts:
        """Yield the last part."""
        yield _CLOSE if self._keys else CallPart(self._name, "{}", whole=True)

    def _expects(self, key: str) -> bool:
        """Return True if an argument of the schema is still missing."""
        return key not in self._keys and key in self._schema.arguments()


_HARMONY_HEAD = re.compile(r"(functions\.)?(\S+?)(?:\s+\w+|\s*<\|constrain\|>\s*\w*)?")


def parse_harmony_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``functions.name<|message|>JSON``, the rest of gpt-oss's messages to functions.

    The model may leave out `functions.` before a name that it was given, and empty arguments.
    """
    head = _HARMONY_HEAD.fullmatch((yield from reader.name("<|message|>")))
    if head is None or not (head[1] or head[2] in tools):
        raise ValueError("no function")
    yield from reader.take("<|message|>")
    if (yield from reader.next()) in ("", HARMONY_END[0]):
        needed = bool(ArgumentsSchema(tools.get(head[2], {})).required())
        yield from reader.take(HARMONY_END, optional=not needed)
        yield CallPart(head[2], "{}", whole=True)
        return
    yield from reader.arguments(head[2])
    yield from reader.take(HARMONY_END, optional=True)
    yield _CLOSE


def parse_deepseek_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse the calls of DeepSeek-V3 and R1 (``function<sep>name`` and a fenced block of JSON) and
    of V3.1 (``name<sep>JSON``)."""
    separator = "<｜tool▁sep｜>"
    while (yield from reader.take(DEEPSEEK_CALL, DEEPSEEK_END, optional=True)) == DEEPSEEK_CALL:
        name = yield from reader.name(separator)
        yield from reader.take(separator)
        fenced = name == "function" and (yield from reader.next()) != "{"
        if fenced:
            name = yield from reader.name("```")
            yield from reader.take("```json", "```")
        yield from reader.arguments(name)
        if fenced:
            yield from reader.take("```")
        yield from reader.take("<｜tool▁call▁end｜>", optional=True)
        yield _CLOSE


_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")


def parse_kimi_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse Kimi-K2's calls, whose ids are ``functions.name:number``. The model may leave out parts
    of an id, and write the marks of the section in the singular."""
    separator = "<|tool_call_argument_begin|>"
    marks = KIMI_CALL, KIMI_SECTION, KIMI_SECTION_END, KIMI_END
    while (mark := (yield from reader.take(*marks, optional=True))) in marks[:2]:
        if mark == KIMI_SECTION:
            continue
        given = yield from reader.name(separator)
        yield from reader.take(separator)
        name = _KIMI_ID.fullmatch(given)
        assert name is not None  # a name is not empty
        yield from reader.arguments(name[1], given if name[2] else None)
        yield from reader.take("<|tool_call_end|>", optional=True)
        yield _CLOSE


def parse_gemma_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``call:name{key:value}``, as Gemma-4 writes it: keys are bare, texts stand between
    marks, and arrays and objects hold the same."""
    yield from reader.take("call:")
    name = yield from reader.name("{")
    yield from reader.take("{")
    yield CallPart(name, "{")
    yield from _gemma_members(reader, ArgumentsSchema(tools.get(name, {})), 0)
    yield from reader.take(GEMMA_END, optional=True)
    yield _CLOSE


def _gemma_members(reader: Reader, schema: ArgumentsSchema, depth: int) -> Parts:
    """Read the members of an object up to its end; yield them as JSON."""
    keys: set[str] = set()
    mark = "," if (yield from reader.next()) != "}" else (yield from reader.take("}"))
    while mark == ",":
        key = (yield from reader.name(":")).removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE)
        if key in keys or _GEMMA_MARKS.search(key):
            raise ValueError("a key twice, or none")
        yield from reader.take(":")
        yield CallPart(arguments=f"{', ' if keys else ''}{_json(key)}: ")
        keys.add(key)
        yield from _gemma_value(reader, schema, schema.argument(key), depth)
        mark = yield from reader.take(",", "}")


_ANY = ArgumentsSchema({})
_GEMMA_END = re.compile(r"[,}\]]")
_GEMMA_MARKS = re.compile(r'[,{}\[\]<>"]')


def _gemma_value(reader: Reader, schema: ArgumentsSchema, of: Any, depth: int) -> Parts:
    """Read a value; yield it as JSON. of: Its own schema, which says what a value without marks
    is; inside arrays and objects it is JSON, or else a text."""
    if depth > MOST_DEPTH:
        raise ValueError("nested too deep")
    yield from reader.next()
    while (rest := reader.text[reader.at : reader.at + len(GEMMA_QUOTE)]) != GEMMA_QUOTE:
        if not GEMMA_QUOTE.startswith(rest) or reader.ended:
            break
        yield None
    if rest == GEMMA_QUOTE:
        reader.at += len(GEMMA_QUOTE)
        yield CallPart(arguments='"')
        yield from reader.value(GEMMA_QUOTE, (",",), ("}",), ("]",), shown=True, lines=None)
        yield CallPart(arguments='"')
    elif rest.startswith("{"):
        reader.at += 1
        yield CallPart(arguments="{")
        yield from _gemma_members(reader, _ANY, depth + 1)
        yield CallPart(arguments="}")
    elif rest.startswith("["):
        reader.at += 1
        yield CallPart(arguments="[")
        mark = "," if (yield from reader.next()) != "]" else (yield from reader.take("]"))
        count = 0
        while mark == ",":
            yield CallPart(arguments=", " * bool(count))
            yield from _gemma_value(reader, _ANY, {}, depth + 1)
            mark, count = (yield from reader.take(",", "]")), count + 1
        yield CallPart(arguments="]")
    else:
        place = reader.at
        while (end := _GEMMA_END.search(reader.text, place)) is None:
            if reader.ended:
                raise ValueError("no end of a value")
            place = len(reader.text)
            yield None
        text, reader.at = reader.text[reader.at : end.start()].strip(), end.start()
        if not text:
            raise ValueError("no value")
        yield CallPart(arguments=_json(schema.value(text, of)))
