"""Syntaxes of tool calls: from a reply's text to calls, and grammars that force calls.

A syntax is an entry of :data:`SYNTAXES`; others may add theirs. Text that looks like a call but
cannot be parsed stays text: nothing of a reply is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.constrain import WHITE_SPACE
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.json_guard import ObjectEnd, read_json
from mlx_moeflux.server.schemas import ANY, ANY_TEXT, ArgumentsSchema

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a function -> JSON schema of its arguments."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. arguments: JSON text of an object. id: As the reply names it."""

    name: str
    arguments: str
    id: str | None = None


Parser = Iterator["ToolCall | None"]
"""Yields a call once it is whole, and None to wait for more text; ends behind the last call."""
Waiting = Generator[None, None, str]


class Reader:
    """The text of a reply behind the begin of calls, as a parser reads it.

    Its methods wait (yield) while the text is too short, and raise ValueError once nothing that
    may follow can be what they look for. text: All that there is; it grows. at: Place up to which
    it is read. ended: The model ended the reply itself, so no more text comes.
    """

    def __init__(self, text: str):
        self.text, self.at, self.ended = text, 0, False

    def take(self, *marks: str, optional: bool = False) -> Waiting:
        """Read white space and one of `marks`, the first that stands there; return it.

        optional: The last one may be missing at the end of a reply that the model ended itself.
        """
        while True:
            self.at = self._behind_space(self.at)
            rest = self.text[self.at : self.at + max(map(len, marks))]
            for mark in marks:
                if rest.startswith(mark):
                    self.at += len(mark)
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
            place = end if end >= 0 else self._searched(mark, place)
            name = self.text[self.at : place].strip()
            if "\n" in name or len(name) > MOST_NAME or (end >= 0 and not name):
                raise ValueError("no name")
            if end >= 0:
                self.at = end
                return name
            yield

    def until(self, mark: str, *rows: tuple[str, ...]) -> Waiting:
        """Read up to `mark` with the marks of one of `rows` behind it; return the text before."""
        place = self.at
        while True:
            end = self.text.find(mark, place)
            if end < 0:
                place = self._searched(mark, place)
                yield
                continue
            found = [self._stand(end + len(mark), row) for row in rows]
            if True in found:
                text, self.at = self.text[self.at : end], end + len(mark)
                return text
            place = end if None in found else end + len(mark)
            if None in found:
                yield

    def object(self) -> Waiting:
        """Read white space and a JSON object; return its text."""
        scanner = ObjectEnd(self.at)
        while (end := scanner.find(self.text)) is None:
            yield
        text, self.at = self.text[self.at : end], end
        return text

    def next(self) -> Waiting:
        """Read white space; return the character behind it, "" at the end of the reply."""
        while True:
            self.at = self._behind_space(self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            yield

    def _searched(self, mark: str, place: int) -> int:
        """Return the place before which `mark` cannot begin any more."""
        return max(place, len(self.text) - len(mark) + 1)

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
MOST_NAME = 300


@dataclass(frozen=True)
class Tags:
    """Tags around the value of each argument, for grammars.

    begin: Key -> Lark expression of the text that opens a value. end: Text that closes it. after:
    Lark expression of the text behind it.
    """

    begin: Callable[[str], str]
    end: str
    after: str

    def rules(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Return Lark rules of the arguments in the schema's order; the first one is `name`.

        Texts go up to the closing tag, everything else is JSON.

        Raises:
            RequestError: The limits of a text cannot be enforced.
        """
        arguments, parts, rules = ArgumentsSchema(schema), [], []
        required = arguments.required()
        for i, (key, value) in enumerate(arguments.arguments().items()):
            types = arguments.types(value)
            if "string" in types and types != ANY:
                try:
                    pattern = arguments.text_pattern(value, self.end)
                except RequestError as error:
                    raise RequestError(f"of the argument '{key[:80]}', {error}") from error
                inner = "text_value"
                if pattern is not None:
                    inner, text = f"{name}_{i}", f"TEXT_{name}_{i}".upper()
                    rules += [self._text(inner, text), f"{text}: {pattern}"]
            else:
                inner = f"%json {_json_rule(arguments.standalone(value))} {_quoted(self.end)}"
            part = f"{self.begin(key)} {inner} {self.after}"
            parts.append(part if key in required else f"({part})?")
        body = " ".join(parts) or '""'
        return [f"{name}: {body}", *rules]

    def shared(self) -> str:
        """Return the Lark rule that all texts without limits share."""
        return self._text("text_value", f"/{ANY_TEXT}/")

    def _text(self, name: str, body: str) -> str:
        return f"{name}[suffix={_quoted(self.end)}]: {body}"


@dataclass(frozen=True)
class ToolSyntax:
    """Syntax of the calls of a family of models.

    markers: Texts that all occur in the chat template of such a model.
    begin, end: Around calls; text outside is the answer.
    parse: (reader behind `begin`, tools) -> parser, which raises ValueError for what is no call.
    call: (name, rule of its arguments) -> Lark grammar of one call, without begin and end.
    tags: Around arguments; None for arguments in JSON.
    text_arguments: The template wants the arguments of earlier calls as JSON text.
    grouped: One begin and end stand around all calls, else around each.
    ends_reply: The end is the token that ends a reply.
    tokens: Special ones inside of calls.
    """

    markers: tuple[str, ...]
    begin: str
    end: str
    parse: Callable[[Reader, Tools], Parser]
    call: Callable[[str, str], str]
    tags: Tags | None = None
    text_arguments: bool = False
    grouped: bool = False
    ends_reply: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def visible(self) -> tuple[str, ...]:
        """The special tokens that a grammar of calls spells as text."""
        return (self.begin, *(() if self.ends_reply else (self.end,)), *self.tokens)


_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_MINIMAX, _MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"
_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_HARMONY_END = "<|call|>"


def _object(text: str) -> str:
    """Return the JSON text of an object; raise ValueError if `text` is something else."""
    if not isinstance(read_json(text), dict):
        raise ValueError("arguments are no object")
    return text.strip()


def parse_json_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``{"name": ..., "arguments": {...}}``, as Hermes and Qwen3 write it."""
    call = read_json((yield from reader.object()))
    yield from reader.take(_CALL_END, optional=True)
    if not isinstance(call.get("name"), str):
        raise ValueError("no name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    yield ToolCall(call["name"], _object(arguments))


_XML_ARGUMENT = re.compile(r"\n<parameter=([^>\n]+)>(?=\n)")


def parse_xml_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``<function=name><parameter=key>value</parameter></function>``, as Qwen3.5 and
    Qwen3-Coder write it."""
    yield from reader.take("<function=")
    call = _TaggedCall((yield from reader.name(">")), tools)
    yield from reader.take(">")
    while (yield from reader.take("<parameter=", "</function>")) == "<parameter=":
        key = yield from reader.name(">")
        yield from reader.take(">")
        rows = ("<parameter=",), ("</function>", _CALL_END)
        value = yield from reader.until("</parameter>", *rows)
        start = 0
        # The model may leave out the end of an argument before another one.
        for found in _XML_ARGUMENT.finditer(value):
            if call.expects(found[1], besides=key):
                call.add(key, value[start : found.start()].removeprefix("\n"))
                key, start = found[1], found.end()
        call.add(key, value[start:].removeprefix("\n").removesuffix("\n"))
    yield from reader.take(_CALL_END, optional=True)
    yield call.whole()


def parse_glm_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``name<arg_key>key</arg_key><arg_value>value</arg_value>``, as GLM-4.5 to 4.7 write it,
    with line breaks or without. Only its end and the schema tell that such a call is whole."""
    call = _TaggedCall((yield from reader.name("<")), tools)
    while (yield from reader.take("<arg_key>", _CALL_END, optional=call.has_all)) == "<arg_key>":
        key = yield from reader.name("</arg_key>")
        yield from reader.take("</arg_key>")
        yield from reader.take("<arg_value>")
        value = yield from reader.until("</arg_value>", ("<arg_key>",), (_CALL_END,))
        call.add(key, value)
    yield call.whole()


def parse_minimax_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse ``<invoke name="name"><parameter name="key">value</parameter></invoke>``, as MiniMax-M2
    writes it."""
    begin, argument = '<invoke name="', '<parameter name="'
    while (yield from reader.take(begin, _MINIMAX_END, optional=True)) == begin:
        call = _TaggedCall((yield from reader.name('"')), tools)
        yield from reader.take('">')
        while (yield from reader.take(argument, "</invoke>")) == argument:
            key = yield from reader.name('"')
            yield from reader.take('">')
            rows = (argument,), ("</invoke>", begin), ("</invoke>", _MINIMAX_END)
            call.add(key, (yield from reader.until("</parameter>", *rows)))
        yield call.whole()


class _TaggedCall:
    """A call whose arguments stand between tags; its schema says what they are."""

    def __init__(self, name: str, tools: Tools):
        self._name, self._known = name, name in tools
        self._schema = ArgumentsSchema(tools.get(name, {}))
        self._arguments: dict[str, Any] = {}

    @property
    def has_all(self) -> bool:
        """Return True if the function is known and no argument that it requires is missing."""
        return self._known and self._schema.required() <= self._arguments.keys()

    def expects(self, key: str, *, besides: str) -> bool:
        """Return True if an argument of the schema is still missing."""
        given = key == besides or key in self._arguments
        return not given and key in self._schema.arguments()

    def add(self, key: str, text: str) -> None:
        self._arguments[key] = self._schema.value(text, self._schema.argument(key))

    def whole(self) -> ToolCall:
        return ToolCall(self._name, json.dumps(self._arguments, ensure_ascii=False))


_HARMONY_HEAD = re.compile(r"(functions\.)?(\S+?)(?:\s+\w+|\s*<\|constrain\|>\s*\w*)?")


def parse_harmony_call(reader: Reader, tools: Tools) -> Parser:
    """Parse ``functions.name<|message|>JSON``, the rest of gpt-oss's messages to functions.

    The model may leave out `functions.` before a name that it was given, and empty arguments.
    """
    head = _HARMONY_HEAD.fullmatch((yield from reader.name("<|message|>")))
    if head is None or not (head[1] or head[2] in tools):
        raise ValueError("no function")
    yield from reader.take("<|message|>")
    needed = bool(ArgumentsSchema(tools.get(head[2], {})).required())
    empty = (yield from reader.next()) in ("", _HARMONY_END[0])
    arguments = "{}" if empty else _object((yield from reader.object()))
    yield from reader.take(_HARMONY_END, optional=not (empty and needed))
    yield ToolCall(head[2], arguments)


def parse_deepseek_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse the calls of DeepSeek-V3 and R1 (``function<sep>name`` and a fenced block of JSON) and
    of V3.1 (``name<sep>JSON``)."""
    begin, separator = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    while (yield from reader.take(begin, _DEEPSEEK_END, optional=True)) == begin:
        name = yield from reader.name(separator)
        yield from reader.take(separator)
        fenced = name == "function" and (yield from reader.next()) != "{"
        if fenced:
            name = yield from reader.name("```")
            yield from reader.take("```json", "```")
        arguments = _object((yield from reader.object()))
        if fenced:
            yield from reader.take("```")
        yield from reader.take("<｜tool▁call▁end｜>", optional=True)
        yield ToolCall(name, arguments)


_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def parse_kimi_calls(reader: Reader, tools: Tools) -> Parser:
    """Parse Kimi-K2's calls, whose ids are ``functions.name:number``."""
    begin, separator = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    while (yield from reader.take(begin, _KIMI_END, optional=True)) == begin:
        given = yield from reader.name(separator)
        yield from reader.take(separator)
        arguments = _object((yield from reader.object()))
        yield from reader.take("<|tool_call_end|>", optional=True)
        name = _KIMI_ID.fullmatch(given)
        assert name is not None  # a name is not empty
        yield ToolCall(name[1], arguments, given)


def _json_rule(schema: Any) -> str:
    """Return a schema for a ``%json`` rule."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


def _quoted(*parts: str) -> str:
    """Return a Lark text of texts."""
    return json.dumps("".join(parts), ensure_ascii=False)


# Name -> syntax, the more particular ones first; --tool-parser names one.
SYNTAXES: dict[str, ToolSyntax] = {
    "qwen3_xml": ToolSyntax(
        ("<tool_call>", "<function=", "<parameter="),
        _CALL,
        _CALL_END,
        parse_xml_call,
        lambda name, rule: (
            f"{_quoted(chr(10), '<function=', name, '>', chr(10))} {rule} "
            f"{_quoted('</function>', chr(10))}"
        ),
        tags=Tags(lambda key: _quoted(f"<parameter={key}>\n"), "\n</parameter>", '"\\n"'),
    ),
    "glm4": ToolSyntax(
        ("<tool_call>", "<arg_key>"),
        _CALL,
        _CALL_END,
        parse_glm_call,
        lambda name, rule: f"{_quoted(name)} /\\n?/ {rule}",
        tags=Tags(
            lambda key: f'{_quoted("<arg_key>", key, "</arg_key>")} /\\n?/ "<arg_value>"',
            "</arg_value>",
            "/\\n?/",
        ),
        tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax_m2": ToolSyntax(
        ("<minimax:tool_call>", "<invoke name="),
        _MINIMAX,
        _MINIMAX_END,
        parse_minimax_calls,
        lambda name, rule: (
            f"/\\n?/ {_quoted('<invoke name=', json.dumps(name), '>', chr(10))} {rule} "
            f'"</invoke>" /\\n?/'
        ),
        tags=Tags(
            lambda key: _quoted("<parameter name=", json.dumps(key), ">"), "</parameter>", '"\\n"'
        ),
        grouped=True,
    ),
    "harmony": ToolSyntax(
        ("<|channel|>", "<|message|>"),
        "<|channel|>commentary to=",
        _HARMONY_END,
        parse_harmony_call,
        lambda name, rule: (
            f"{_quoted('functions.', name, ' ', '<|constrain|>json<|message|>')} {rule}"
        ),
        ends_reply=True,
        tokens=("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    "hermes": ToolSyntax(
        ("<tool_call>", "</tool_call>"),
        _CALL,
        _CALL_END,
        parse_json_call,
        lambda name, rule: (
            f'"\\n{{\\"name\\": " {_quoted(json.dumps(name))} ", \\"arguments\\": " {rule} "}}\\n"'
        ),
    ),
    "deepseek_v3": ToolSyntax(
        ("<｜tool▁calls▁begin｜>", "```json"),
        _DEEPSEEK,
        _DEEPSEEK_END,
        parse_deepseek_calls,
        lambda name, rule: (
            f"{_quoted('<｜tool▁call▁begin｜>function<｜tool▁sep｜>', name)} "
            f'"\\n```json\\n" {rule} {_quoted(chr(10), "```<｜tool▁call▁end｜>")}'
        ),
        text_arguments=True,
        grouped=True,
    ),
    "deepseek_v3.1": ToolSyntax(
        ("<｜tool▁calls▁begin｜>",),
        _DEEPSEEK,
        _DEEPSEEK_END,
        parse_deepseek_calls,
        lambda name, rule: (
            f"{_quoted('<｜tool▁call▁begin｜>', name, '<｜tool▁sep｜>')} {rule} "
            f"{_quoted('<｜tool▁call▁end｜>')}"
        ),
        text_arguments=True,
        grouped=True,
    ),
    "kimi_k2": ToolSyntax(
        (_KIMI,),
        _KIMI,
        _KIMI_END,
        parse_kimi_calls,
        lambda name, rule: (
            f"{_quoted('<|tool_call_begin|>functions.', name, ':')} /[0-9]{{1,3}}/ "
            f'"<|tool_call_argument_begin|>" {rule} "<|tool_call_end|>"'
        ),
        text_arguments=True,
        grouped=True,
    ),
}


def choose_syntax(templates: Iterable[str | None], name: str | None = None) -> ToolSyntax | None:
    """Return the named syntax, or the first whose markers are all in one of the templates."""
    if name is not None:
        return SYNTAXES[name]
    known = [template for template in templates if template]
    for syntax in SYNTAXES.values():
        if any(all(marker in template for marker in syntax.markers) for template in known):
            return syntax
    return None


def calls_grammar(
    syntax: ToolSyntax,
    tools: Tools,
    *,
    many: bool,
    answer: Sequence[Mapping[str, Any] | None] = (),
) -> str:
    """Return the Lark grammar of a reply that calls at least one of `tools`, `many` or one.

    answer: (schema,) allows JSON of a schema instead, (None,) any object.

    Raises:
        RequestError: A schema has limits that cannot be enforced in this syntax.
    """
    rules, names = [], []
    for i, (name, schema) in enumerate(tools.items()):
        arguments = f"arguments_{i}"
        if syntax.tags is None:
            rules.append(f"{arguments}: %json {_json_rule({'type': 'object', **schema})}")
        else:
            try:
                rules += syntax.tags.rules(arguments, schema)
            except RequestError as error:
                raise RequestError(
                    f"'tools' cannot be enforced: in '{name[:80]}', {error}", param="tools"
                ) from error
        rules.append(f"call_{i}: {syntax.call(name, arguments)}")
        names.append(f"call_{i}")
    begin, end = _quoted(syntax.begin), "" if syntax.ends_reply else _quoted(syntax.end)
    many = many and not syntax.ends_reply
    one = f"({' | '.join(names)})"
    if syntax.grouped:
        start = f"{begin} {one}{'+' if many else ''} {end}"
    else:
        start = f"{begin} {one} {end}"
        start += f' ("\\n" {start})*' if many else ""
    shared = [] if syntax.tags is None else [syntax.tags.shared()]
    for schema in answer:
        whole = {"type": "object"} if schema is None else schema
        shared.append(f"answer: %json {_json_rule(whole)}")
        start += " | answer"
    return "\n".join([f"start: {start}", *rules, *shared])


@dataclass
class Found:
    """Text and calls of a part of a reply. unfinished: The text is a call that has no end."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    unfinished: bool = False


class ToolSplitter:
    """Splits the text of one reply into answer and calls. most: Calls after which it ends.

    A call is handed out once its parser has read its end.
    """

    def __init__(self, syntax: ToolSyntax, tools: Tools, *, most: int | None = None):
        self._syntax, self._tools, self._most = syntax, tools, most
        self._held, self.count = "", 0  # text that is not yet part of a call or the answer
        self._open: _OpenCalls | None = None
        self._broken = False

    @property
    def full(self) -> bool:
        """Return True after `most` calls."""
        return self._most is not None and self.count >= self._most

    def add(self, text: str, *, final: bool = False, cut: bool = False) -> Found:
        """Return what is certain after `text`; with `final`, everything that was held back.

        cut: The model did not end the reply itself (a limit did). Then no call may lack its end;
        otherwise marks may be missing that tell nothing new.
        """
        self._held += text
        found, inside = Found(), self._open is not None
        while not self.full and self._step(found, ended=final and not cut):
            pass
        if self.full:
            self._held = ""
        elif self._open is not None:
            rest = self._open.rest
            # Behind a whole call, white space and a part of the end are no text.
            if final and (self._open.opening or not self._syntax.end.startswith(rest.strip())):
                found.text, found.unfinished = found.text + rest, True
        elif self._held:
            # The half of a character at the end of a cut call breaks it.
            found.unfinished = final and inside and self._broken
            self._answer(found, final)
        return found

    def _step(self, found: Found, *, ended: bool) -> bool:
        """Enter or leave calls; return False once more text is needed."""
        if self._open is not None:
            return self._leave_calls(self._open, found, ended)
        if self._broken:
            return self._leave_broken(found)
        return self._enter_calls(found)

    def _enter_calls(self, found: Found) -> bool:
        at = self._held.find(self._syntax.begin)
        if at < 0:
            return False
        # White space before a call belongs to its syntax.
        text = self._held[:at].rstrip()
        found.text += text
        behind = at + len(self._syntax.begin)
        opening, reader = self._held[len(text) : behind], Reader(self._held[behind:])
        self._open = _OpenCalls(opening, reader, self._syntax.parse(reader, self._tools))
        self._held = ""
        return True

    def _leave_calls(self, calls: _OpenCalls, found: Found, ended: bool) -> bool:
        calls.reader.text += self._held
        calls.reader.ended, self._held = ended, ""
        try:
            for call in calls.parser:
                if call is None:
                    return False
                found.calls.append(call)
                self.count += 1
                calls.opening, calls.kept = "", calls.reader.at
                if self.full:
                    return False
            if calls.opening:
                raise ValueError("no call")
        except (ValueError, TypeError, RecursionError):
            self._broken = True
        else:
            calls.kept = calls.reader.at
        self._open, self._held = None, calls.rest
        return True

    def _leave_broken(self, found: Found) -> bool:
        """Hand out the rest of what is no call as text."""
        at = self._held.find(self._syntax.end)
        if at < 0:
            return False
        at += len(self._syntax.end)
        found.text += self._held[:at]
        self._held, self._broken = self._held[at:], False
        return True

    def _answer(self, found: Found, final: bool) -> None:
        """Hand out text that cannot belong to a call."""
        mark = self._syntax.end if self._broken else self._syntax.begin
        certain = len(self._held) - (0 if final else overlap(self._held, mark))
        if not final or self.count:  # white space may stand before a call, or behind the last one
            certain = len(self._held[:certain].rstrip())
        found.text += self._held[:certain]
        self._held = self._held[certain:]


@dataclass
class _OpenCalls:
    """Calls whose end was not read yet. opening: Text before the reader's, until a call is whole.
    kept: Place in the reader's text behind the last whole call."""

    opening: str
    reader: Reader
    parser: Parser
    kept: int = 0

    @property
    def rest(self) -> str:
        """Return the text that belongs to no whole call."""
        return self.opening + self.reader.text[self.kept :]


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of tools in OpenAI's form."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
