"""Syntaxes of tool calls: from a reply's text to calls, and grammars that force calls.

A syntax is an entry of :data:`SYNTAXES`; others may add theirs. Text that looks like a call but
cannot be parsed stays text: nothing of a reply is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.constrain import WHITE_SPACE
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.json_guard import read_json
from mlx_moeflux.server.schemas import ANY, ANY_TEXT, ArgumentsSchema

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a function -> JSON schema of its arguments."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. arguments: JSON text of an object. id: As the reply names it."""

    name: str
    arguments: str
    id: str | None = None


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

    markers: Texts that all occur in the chat template of such a model. begin, end: Around calls;
    text outside is the answer. parse: (text between them, tools) -> calls; raises ValueError for
    what is no call. call: (name, rule of its arguments) -> Lark grammar of one call, without begin
    and end. tags: Around arguments; None for arguments in JSON. text_arguments: The template wants
    the arguments of earlier calls as JSON text. grouped: One begin and end stand around all calls,
    else around each. ends_reply: The end is the token that ends a reply. tokens: Special ones
    inside of calls.
    """

    markers: tuple[str, ...]
    begin: str
    end: str
    parse: Callable[[str, Tools], list[ToolCall]]
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


def _object(text: str) -> str:
    """Return the JSON text of an object; raise ValueError if `text` is something else."""
    if not isinstance(read_json(text), dict):
        raise ValueError("arguments are no object")
    return text.strip()


def parse_json_call(text: str, tools: Tools) -> list[ToolCall]:
    """Parse ``{"name": ..., "arguments": {...}}``, as Hermes and Qwen3 write it."""
    call = read_json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("no name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return [ToolCall(call["name"], _object(arguments))]
    return [ToolCall(call["name"], _object(json.dumps(arguments, ensure_ascii=False)))]


_XML_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_XML_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)\s*", re.DOTALL
)


def parse_xml_call(text: str, tools: Tools) -> list[ToolCall]:
    """Parse ``<function=name><parameter=key>value</parameter></function>``, as Qwen3.5 and
    Qwen3-Coder write it. The schema says which values are texts."""
    call = _XML_CALL.fullmatch(text)
    if call is None:
        raise ValueError("no function")
    name, inner = call[1].strip(), call[2]
    schema = ArgumentsSchema(tools.get(name, {}))
    arguments, at = {}, 0
    while inner[at:].strip():
        found = _XML_PARAMETER.match(inner, at)
        if found is None:
            raise ValueError("no parameter")
        key, value = found[1].strip(), found[2].removeprefix("\n").removesuffix("\n")
        arguments[key], at = schema.value(value, schema.argument(key)), found.end()
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]


def _json_rule(schema: Any) -> str:
    """Return a schema for a ``%json`` rule."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


_GLM_CALL = re.compile(r"\s*([^\n<]+?)\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)\s*", re.DOTALL
)
_MINIMAX_CALL = re.compile(r"\s*<invoke name=\"([^\"]+)\">(.*?)(?:</invoke>|\Z)\s*", re.DOTALL)
_MINIMAX_ARGUMENT = re.compile(
    r"\s*<parameter name=\"([^\"]+)\">(.*?)(?:</parameter>|\Z)\s*", re.DOTALL
)


def parse_glm_call(text: str, tools: Tools) -> list[ToolCall]:
    """Parse ``name<arg_key>key</arg_key><arg_value>value</arg_value>``, as GLM-4.5 to 4.7 write it,
    with line breaks or without."""
    call = _GLM_CALL.fullmatch(text)
    if call is None:
        raise ValueError("no name")
    return [_tagged_call(call[1], call[2], _GLM_ARGUMENT, tools)]


def parse_minimax_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Parse ``<invoke name="name"><parameter name="key">value</parameter></invoke>``, as MiniMax-M2
    writes it."""
    calls = _all(_MINIMAX_CALL, text)
    return [_tagged_call(name, inner, _MINIMAX_ARGUMENT, tools) for name, inner in calls]


def _tagged_call(name: str, inner: str, argument: re.Pattern, tools: Tools) -> ToolCall:
    """Return a call whose schema says which values are texts."""
    schema = ArgumentsSchema(tools.get(name, {}))
    found = _all(argument, inner) if inner.strip() else []
    arguments = {
        key.strip(): schema.value(value, schema.argument(key.strip())) for key, value in found
    }
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


_HARMONY_CALL = re.compile(
    r"\s*functions\.(\S+?)\s*(?:<\|constrain\|>\w*)?<\|message\|>(.*)", re.DOTALL
)


def parse_harmony_call(text: str, tools: Tools) -> list[ToolCall]:
    """Parse ``functions.name<|message|>JSON``, the rest of gpt-oss's messages to functions."""
    call = _HARMONY_CALL.fullmatch(text)
    if call is None:
        raise ValueError("no function")
    return [ToolCall(call[1], _object(call[2]))]


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)\s*", re.DOTALL
)
_FENCED = re.compile(r"([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


def parse_deepseek_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Parse the calls of DeepSeek-V3 and R1 (``function<sep>name`` and a fenced block of JSON) and
    of V3.1 (``name<sep>JSON``)."""
    calls = []
    for kind, rest in _all(_DEEPSEEK_CALL, text):
        fenced = _FENCED.fullmatch(rest) if kind == "function" else None
        name, arguments = (fenced[1], fenced[2]) if fenced else (kind, rest)
        calls.append(ToolCall(name.strip(), _object(arguments)))
    return calls


_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)"
    r"(?:<\|tool_call_end\|>|\Z)\s*",
    re.DOTALL,
)
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def parse_kimi_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Parse Kimi-K2's calls, whose ids are ``functions.name:number``."""
    calls = []
    for given, arguments in _all(_KIMI_CALL, text):
        name = _KIMI_ID.fullmatch(given.strip())
        if name is None:
            raise ValueError("no name")
        calls.append(ToolCall(name[1], _object(arguments), given.strip()))
    return calls


def _all(pattern: re.Pattern, text: str) -> list[tuple[str, ...]]:
    """Return the groups of adjacent matches; raise ValueError unless they cover the text."""
    found, at = [], 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            raise ValueError("no call")
        found.append(match.groups())
        at = match.end()
    if not found:
        raise ValueError("no call")
    return found


def _quoted(*parts: str) -> str:
    """Return a Lark text of texts."""
    return json.dumps("".join(parts), ensure_ascii=False)


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# Name -> syntax, the more particular ones first; --tool-parser names one.
SYNTAXES: dict[str, ToolSyntax] = {
    "qwen3_xml": ToolSyntax(
        ("<tool_call>", "<function=", "<parameter="),
        "<tool_call>",
        "</tool_call>",
        parse_xml_call,
        lambda name, rule: (
            f"{_quoted(chr(10), '<function=', name, '>', chr(10))} {rule} "
            f"{_quoted('</function>', chr(10))}"
        ),
        tags=Tags(lambda key: _quoted(f"<parameter={key}>\n"), "\n</parameter>", '"\\n"'),
    ),
    "glm4": ToolSyntax(
        ("<tool_call>", "<arg_key>"),
        "<tool_call>",
        "</tool_call>",
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
        "<minimax:tool_call>",
        "</minimax:tool_call>",
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
        ("<|channel|>", "<|constrain|>"),
        "<|channel|>commentary to=",
        "<|call|>",
        parse_harmony_call,
        lambda name, rule: (
            f"{_quoted('functions.', name, ' ', '<|constrain|>json<|message|>')} {rule}"
        ),
        ends_reply=True,
        tokens=("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    "hermes": ToolSyntax(
        ("<tool_call>", "</tool_call>"),
        "<tool_call>",
        "</tool_call>",
        parse_json_call,
        lambda name, rule: (
            f'"\\n{{\\"name\\": " {_quoted(json.dumps(name))} ", \\"arguments\\": " {rule} "}}\\n"'
        ),
    ),
    "deepseek_v3": ToolSyntax(
        ("<｜tool▁calls▁begin｜>", "```json"),
        *_DEEPSEEK,
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
        *_DEEPSEEK,
        parse_deepseek_calls,
        lambda name, rule: (
            f"{_quoted('<｜tool▁call▁begin｜>', name, '<｜tool▁sep｜>')} {rule} "
            f"{_quoted('<｜tool▁call▁end｜>')}"
        ),
        text_arguments=True,
        grouped=True,
    ),
    "kimi_k2": ToolSyntax(
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
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


def calls_grammar(syntax: ToolSyntax, tools: Tools, *, many: bool) -> str:
    """Return the Lark grammar of a reply that calls at least one of `tools`, `many` or one.

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
    return "\n".join([f"start: {start}", *rules, *shared])


@dataclass
class Found:
    """Text and calls of a part of a reply."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolSplitter:
    """Splits the text of one reply into answer and calls. most: Calls after which it ends."""

    def __init__(self, syntax: ToolSyntax, tools: Tools, *, most: int | None = None):
        self._syntax, self._tools, self._most = syntax, tools, most
        self._held, self._opening, self._inside, self.count = "", "", False, 0

    @property
    def full(self) -> bool:
        """Return True after `most` calls."""
        return self._most is not None and self.count >= self._most

    def add(self, text: str, *, final: bool = False) -> Found:
        """Return what is certain after `text`; with `final`, everything that was held back."""
        self._held += text
        found = Found()
        while not self.full and (self._leave_call(found, final) or self._enter_call(found)):
            pass
        if self.full:
            self._held = ""
        if not self._inside:
            certain = len(self._held)
            if not final:
                certain -= overlap(self._held, self._syntax.begin)
                certain = len(self._held[:certain].rstrip())
            found.text += self._held[:certain] if self._held[:certain].strip() or final else ""
            self._held = self._held[certain:]
            if final and self.count and not found.text.strip():
                found.text = ""  # white space behind the last call
        return found

    def _enter_call(self, found: Found) -> bool:
        at = self._held.find(self._syntax.begin)
        if self._inside or at < 0:
            return False
        # White space before a call belongs to its syntax.
        text = self._held[:at].rstrip()
        found.text += text
        self._opening = self._held[len(text) : at + len(self._syntax.begin)]
        self._held, self._inside = self._held[at + len(self._syntax.begin) :], True
        return True

    def _leave_call(self, found: Found, final: bool) -> bool:
        """Parse a call whose end is there, or (`final`) missing."""
        if not self._inside:
            return False
        end = self._syntax.end
        at = self._held.find(end)
        if at < 0 and not final:
            return False
        inner = self._held if at < 0 else self._held[:at]
        rest = "" if at < 0 else self._held[at + len(end) :]
        try:
            calls = self._syntax.parse(inner, self._tools)
        except (ValueError, TypeError, RecursionError):
            found.text += self._opening + inner + ("" if at < 0 else end)
        else:
            room = None if self._most is None else self._most - self.count
            found.calls += calls[:room]
            self.count += len(calls[:room])
        self._held, self._inside = rest, False
        return True


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of tools in OpenAI's form."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
