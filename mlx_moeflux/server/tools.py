"""Syntaxes of tool calls: from a reply's text to calls, and grammars that force calls.

A syntax is an entry of :data:`SYNTAXES`; others may add theirs. Text that looks like a call but
cannot be parsed stays text: nothing of a reply is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_moeflux.detokenizer import overlap
from mlx_moeflux.server.calls import (
    CALL,
    CALL_END,
    DEEPSEEK,
    DEEPSEEK_CALL,
    DEEPSEEK_END,
    DSML,
    DSML_CALLS,
    DSML_CALLS_END,
    DSML_INVOKE,
    FUNCTION,
    GEMMA,
    GEMMA_END,
    GEMMA_QUOTE,
    HARMONY_END,
    INVOKE,
    KIMI,
    KIMI_CALL,
    KIMI_END,
    KIMI_SECTION,
    MINIMAX,
    MINIMAX_END,
    CallPart,
    Parser,
    Reader,
    Tools,
    parse_deepseek_calls,
    parse_dsml_calls,
    parse_gemma_call,
    parse_glm_call,
    parse_harmony_call,
    parse_json_call,
    parse_kimi_calls,
    parse_minimax_calls,
    parse_xml_calls,
)
from mlx_moeflux.server.constrain import json_rule, quoted
from mlx_moeflux.server.errors import RequestError
from mlx_moeflux.server.marked_arguments import MarkedArguments
from mlx_moeflux.server.schemas import ANY, ANY_TEXT, TEXT, ArgumentsSchema, only_types


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
            try:
                inner = self._value(f"{name}_{i}", key, value, arguments, rules)
            except RequestError as error:
                raise RequestError(f"of the argument '{key[:80]}', {error}") from error
            part = f"{inner} {self.after}"
            parts.append(part if key in required else f"({part})?")
        body = " ".join(parts) or '""'
        return [f"{name}: {body}", *rules]

    def shared(self) -> str:
        """Return the Lark rule that all texts without limits share."""
        return self._suffixed("text_value", f"/{ANY_TEXT}/")

    def _value(
        self, name: str, key: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]
    ) -> str:
        """Return the expression of a value with the tag that opens it; add to `rules`."""
        types = arguments.types(schema)
        write = self._text if "string" in types and types != ANY else self._json
        return f"{self.begin(key)} {write(name, schema, arguments, rules)}"

    def _text(self, name: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]) -> str:
        pattern = arguments.text_pattern(schema, self.end)
        if pattern is None:
            return "text_value"
        text = f"TEXT_{name}".upper()
        rules += [self._suffixed(name, text), f"{text}: {pattern}"]
        return name

    def _json(self, name: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]) -> str:
        return f"%json {json_rule(arguments.standalone(schema))} {quoted(self.end)}"

    def _suffixed(self, name: str, body: str) -> str:
        return f"{name}[suffix={quoted(self.end)}]: {body}"


@dataclass(frozen=True)
class TypedTags(Tags):
    """Tags that say which values are texts. begin: Of a text. begin_json: Of every other value."""

    begin_json: Callable[[str], str]

    def _value(
        self, name: str, key: str, schema: Any, arguments: ArgumentsSchema, rules: list[str]
    ) -> str:
        types, forms = arguments.types(schema), []
        if "string" in types:
            text = self._text(name, only_types(schema, TEXT), arguments, rules)
            forms.append(f"{self.begin(key)} {text}")
        if others := types - TEXT:
            value = self._json(name, only_types(schema, others), arguments, rules)
            forms.append(f"{self.begin_json(key)} {value}")
        if not forms:
            raise RequestError("it allows no value")
        return f"({' | '.join(forms)})"


@dataclass(frozen=True)
class ToolSyntax:
    """Syntax of the calls of a family of models.

    markers: Texts that all occur in the chat template of such a model.
    begin, end: Around calls; text outside is the answer.
    parse: (reader behind `begin`, tools) -> parser, which raises ValueError for what is no call.
    bare: Marks of which each begins calls too, as the model may leave `begin` out; the parser reads
        them. Behind them only functions of the request are called.
    call: (name, rule of its arguments) -> Lark grammar of one call, without begin and end.
    tags: Around arguments; None for arguments in JSON.
    text_arguments: The template wants the arguments of earlier calls as JSON text.
    grouped: One begin and end stand around all calls, else around each. between: Text between calls
        that each have theirs.
    ends_reply: The end is the token that ends a reply.
    tokens: Special ones inside of calls.
    """

    markers: tuple[str, ...]
    begin: str
    end: str
    parse: Callable[[Reader, Tools], Parser]
    call: Callable[[str, str], str]
    tags: Tags | MarkedArguments | None = None
    text_arguments: bool = False
    grouped: bool = False
    between: str = "\n"
    ends_reply: bool = False
    tokens: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin, *self.bare)

    @property
    def visible(self) -> tuple[str, ...]:
        """The special tokens that a grammar of calls spells as text."""
        return (self.begin, *(() if self.ends_reply else (self.end,)), *self.tokens)


# Name -> syntax, the more particular ones first; --tool-parser names one.
SYNTAXES: dict[str, ToolSyntax] = {
    "qwen3_xml": ToolSyntax(
        ("<tool_call>", "<function=", "<parameter="),
        CALL,
        CALL_END,
        parse_xml_calls,
        lambda name, rule: (
            f"{quoted(chr(10), FUNCTION, name, '>', chr(10))} {rule} "
            f"{quoted('</function>', chr(10))}"
        ),
        tags=Tags(lambda key: quoted(f"<parameter={key}>\n"), "\n</parameter>", '"\\n"'),
        bare=(FUNCTION,),
    ),
    "glm4": ToolSyntax(
        ("<tool_call>", "<arg_key>"),
        CALL,
        CALL_END,
        parse_glm_call,
        lambda name, rule: f"{quoted(name)} /\\n?/ {rule}",
        tags=Tags(
            lambda key: f'{quoted("<arg_key>", key, "</arg_key>")} /\\n?/ "<arg_value>"',
            "</arg_value>",
            "/\\n?/",
        ),
        tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax_m2": ToolSyntax(
        ("<minimax:tool_call>", "<invoke name="),
        MINIMAX,
        MINIMAX_END,
        parse_minimax_calls,
        lambda name, rule: (
            f"/\\n?/ {quoted('<invoke name=', json.dumps(name), '>', chr(10))} {rule} "
            f'"</invoke>" /\\n?/'
        ),
        tags=Tags(
            lambda key: quoted("<parameter name=", json.dumps(key), ">"), "</parameter>", '"\\n"'
        ),
        grouped=True,
        bare=(INVOKE,),
    ),
    "deepseek_v3.2": ToolSyntax(
        (DSML, "function_calls>"),
        DSML_CALLS,
        DSML_CALLS_END,
        parse_dsml_calls,
        lambda name, rule: (
            f"/\\n?/ {quoted(DSML_INVOKE, name, chr(34), '>', chr(10))} {rule} "
            f"{quoted('</', DSML, 'invoke>')} /\\n?/"
        ),
        tags=TypedTags(
            lambda key: quoted(f'<{DSML}parameter name="{key}" string="true">'),
            f"</{DSML}parameter>",
            '"\\n"',
            begin_json=lambda key: quoted(f'<{DSML}parameter name="{key}" string="false">'),
        ),
        grouped=True,
        tokens=(DSML,),
        bare=(DSML_INVOKE,),
    ),
    "harmony": ToolSyntax(
        ("<|channel|>", "<|message|>"),
        "<|channel|>commentary to=",
        HARMONY_END,
        parse_harmony_call,
        lambda name, rule: (
            f"{quoted('functions.', name, ' ', '<|constrain|>json<|message|>')} {rule}"
        ),
        ends_reply=True,
        tokens=("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    "gemma4": ToolSyntax(
        (GEMMA, GEMMA_END, GEMMA_QUOTE),
        GEMMA,
        GEMMA_END,
        parse_gemma_call,
        lambda name, rule: f'{quoted("call:", name, "{")} {rule} "}}"',
        tags=MarkedArguments(),
        between="",
        tokens=(GEMMA_QUOTE,),
    ),
    "hermes": ToolSyntax(
        ("<tool_call>", "</tool_call>"),
        CALL,
        CALL_END,
        parse_json_call,
        lambda name, rule: (
            f'"\\n{{\\"name\\": " {quoted(json.dumps(name))} ", \\"arguments\\": " {rule} "}}\\n"'
        ),
    ),
    "deepseek_v3": ToolSyntax(
        ("<｜tool▁calls▁begin｜>", "```json"),
        DEEPSEEK,
        DEEPSEEK_END,
        parse_deepseek_calls,
        lambda name, rule: (
            f"{quoted('<｜tool▁call▁begin｜>function<｜tool▁sep｜>', name)} "
            f'"\\n```json\\n" {rule} {quoted(chr(10), "```<｜tool▁call▁end｜>")}'
        ),
        text_arguments=True,
        grouped=True,
        bare=(DEEPSEEK_CALL,),
    ),
    "deepseek_v3.1": ToolSyntax(
        ("<｜tool▁calls▁begin｜>",),
        DEEPSEEK,
        DEEPSEEK_END,
        parse_deepseek_calls,
        lambda name, rule: (
            f"{quoted('<｜tool▁call▁begin｜>', name, '<｜tool▁sep｜>')} {rule} "
            f"{quoted('<｜tool▁call▁end｜>')}"
        ),
        text_arguments=True,
        grouped=True,
        bare=(DEEPSEEK_CALL,),
    ),
    "kimi_k2": ToolSyntax(
        (KIMI,),
        KIMI,
        KIMI_END,
        parse_kimi_calls,
        lambda name, rule: (
            f"{quoted('<|tool_call_begin|>functions.', name, ':')} /[0-9]{{1,3}}/ "
            f'"<|tool_call_argument_begin|>" {rule} "<|tool_call_end|>"'
        ),
        text_arguments=True,
        grouped=True,
        bare=(KIMI_SECTION, KIMI_CALL),
    ),
}


def choose_syntax(templates: Iterable[str | None], name: str | None = None) -> ToolSyntax | None:
    """Return the named syntax, or the first whose markers are all in one of the templates.

    A template that writes the arguments of earlier calls as JSON itself gets them as objects.
    """
    known = [template for template in templates if template]
    found = [SYNTAXES[name]] if name is not None else SYNTAXES.values()
    for syntax in found:
        marked = (all(mark in template for mark in syntax.markers) for template in known)
        if name is not None or any(marked):
            encoded = any(_ENCODED_ARGUMENTS.search(template) for template in known)
            objects = syntax.text_arguments and encoded
            return replace(syntax, text_arguments=False) if objects else syntax
    return None


_ENCODED_ARGUMENTS = re.compile(r"""arguments['"]?\]?\s*\|\s*tojson""")


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
            rules.append(f"{arguments}: %json {json_rule({'type': 'object', **schema})}")
        else:
            try:
                rules += syntax.tags.rules(arguments, schema)
            except RequestError as error:
                raise RequestError(
                    f"'tools' cannot be enforced: in '{name[:80]}', {error}", param="tools"
                ) from error
        rules.append(f"call_{i}: {syntax.call(name, arguments)}")
        names.append(f"call_{i}")
    begin, end = quoted(syntax.begin), "" if syntax.ends_reply else quoted(syntax.end)
    many = many and not syntax.ends_reply
    one = f"({' | '.join(names)})"
    if syntax.grouped:
        start = f"{begin} {one}{'+' if many else ''} {end}"
    else:
        start = f"{begin} {one} {end}"
        start += f" ({quoted(syntax.between)} {start})*" if many else ""
    shared = [] if syntax.tags is None else [syntax.tags.shared()]
    for schema in answer:
        whole = {"type": "object"} if schema is None else schema
        shared.append(f"answer: %json {json_rule(whole)}")
        start += " | answer"
    return "\n".join([f"start: {start}", *rules, *shared])


@dataclass
class Found:
    """What is certain of a part of a reply. pieces: Answer and parts of calls, in order, parts of
    the same call joined. unfinished: Behind them, the text of a call that has no end."""

    pieces: list[str | CallPart] = field(default_factory=list)
    unfinished: str = ""

    @property
    def text(self) -> str:
        return "".join(p for p in self.pieces if isinstance(p, str)) + self.unfinished

    @property
    def calls(self) -> list[CallPart]:
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]

    def add(self, piece: str | CallPart) -> None:
        last = self.pieces[-1] if self.pieces else ""
        if isinstance(piece, CallPart):
            if isinstance(last, CallPart) and last.index == piece.index:
                self.pieces[-1] = last + piece
            else:
                self.pieces.append(piece)
        elif piece:
            self.pieces.append(piece)


class ToolSplitter:
    """Splits the text of one reply into answer and calls, as they come.

    most: Calls after which it ends. strays: Marks that are dropped behind a call, besides the
    syntax's end. count: Number of whole calls.

    A call of a function that is not in `tools` is handed out once it is whole, a call of another
    one part by part.
    """

    def __init__(
        self,
        syntax: ToolSyntax,
        tools: Tools,
        *,
        most: int | None = None,
        strays: Sequence[str] = (),
    ):
        self._syntax, self._tools, self._most = syntax, tools, most
        self._strays = (syntax.end, *strays)
        self._held, self.count = "", 0  # text that is not yet part of a call or the answer
        self._begun = 0  # calls of which a part was handed out
        self._ids: set[str] = set()
        self._open: _OpenCalls | None = None
        self._broken = self._behind = False

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
                found.unfinished = rest
        elif self._held:
            # The half of a character at the end of a cut call breaks it.
            if final and inside and self._broken:
                found.unfinished = self._held.rstrip() if self.count else self._held
            else:
                self._answer(found, final)
        return found

    def _step(self, found: Found, *, ended: bool) -> bool:
        """Enter or leave calls; return False once more text is needed."""
        if self._open is not None:
            return self._leave_calls(self._open, found, ended)
        if self._broken:
            return self._leave_broken(found)
        if self._behind and not self._leave_strays():
            return False
        return self._enter_calls(found)

    def _leave_strays(self) -> bool:
        """Drop marks that stand behind a call; return False if one may still follow."""
        rest = self._held.lstrip()
        while mark := next((mark for mark in self._strays if rest.startswith(mark)), ""):
            self._held = rest[len(mark) :]
            rest = self._held.lstrip()
        self._behind = any(mark.startswith(rest) for mark in self._strays)
        return not self._behind

    def _enter_calls(self, found: Found) -> bool:
        at, mark = _first(self._held, self._syntax.begins)
        if not mark:
            return False
        # White space before a call belongs to its syntax.
        text = self._held[:at].rstrip()
        found.add(text)
        bare = mark != self._syntax.begin
        behind = at if bare else at + len(mark)
        opening, reader = self._held[len(text) : behind], Reader(self._held[behind:])
        self._open = _OpenCalls(opening, reader, self._syntax.parse(reader, self._tools), bare)
        self._held = ""
        return True

    def _leave_calls(self, calls: _OpenCalls, found: Found, ended: bool) -> bool:
        calls.reader.text += self._held
        calls.reader.ended, self._held = ended, ""
        try:
            for part in calls.parser:
                if part is None:
                    return False
                self._take(calls, part, found)
                if self.full:
                    return False
            if not calls.whole:
                raise ValueError("no call")
        except (ValueError, TypeError, RecursionError):
            self._no_call(calls, found)
        else:
            calls.kept = calls.reader.at
            self._held, self._behind = calls.rest, True
        self._open = None
        return True

    def _take(self, calls: _OpenCalls, part: CallPart, found: Found) -> None:
        """Hand out a part of a call, or keep it until the call is whole."""
        if part.name and part.name not in self._tools:
            if calls.bare:
                raise ValueError("no function of the request")
            calls.waiting = part
        elif calls.waiting is not None:
            calls.waiting += part
        if calls.waiting is not None:
            if not part.whole:
                return
            part, calls.waiting = calls.waiting, None
        if part.name:
            self._begun += 1
            part = replace(part, id=self._own_id(part.id))
        found.add(replace(part, index=self._begun - 1))
        calls.sent = True
        if part.whole:
            self.count += 1
            calls.end_call()

    def _own_id(self, given: str | None) -> str:
        """Return the id that the model gives if no other call has it, else a new one."""
        if not given or given in self._ids:
            given = f"call_{uuid.uuid4().hex[:24]}"
        self._ids.add(given)
        return given

    def _no_call(self, calls: _OpenCalls, found: Found) -> None:
        """Leave what proved to be no call. A mark that the model only mentions is text; behind the
        begin of a broken call everything is, up to the end mark."""
        self._held = rest = calls.rest
        if calls.whole and not calls.reader.begun:
            return  # no further call was begun
        text = rest.lstrip()
        mark = next((mark for mark in self._syntax.begins if text.startswith(mark)), "")
        self._broken = calls.broken
        if not self._broken:
            behind = len(rest) - len(text) + len(mark)
            found.add(rest[:behind])
            self._held = rest[behind:]

    def _leave_broken(self, found: Found) -> bool:
        """Hand out the rest of what is no call as text."""
        at = self._held.find(self._syntax.end)
        if at < 0:
            return False
        at += len(self._syntax.end)
        found.add(self._held[:at])
        self._held, self._broken = self._held[at:], False
        return True

    def _answer(self, found: Found, final: bool) -> None:
        """Hand out text that cannot belong to a call."""
        if self._behind and not final:
            return
        marks = (self._syntax.end,) if self._broken else self._syntax.begins
        held = 0 if final else max(overlap(self._held, mark) for mark in marks)
        certain = len(self._held) - held
        if not final or self.count:  # white space may stand before a call, or behind the last one
            certain = len(self._held[:certain].rstrip())
        found.add(self._held[:certain])
        self._held = self._held[certain:]


@dataclass
class _OpenCalls:
    """Calls whose end was not read yet. opening: Text before the reader's, until a call is whole.
    bare: The calls have no begin. kept: Place in the reader's text behind the last whole call.
    sent: A part of the call behind it was handed out. waiting: The part so far of a call that is
    handed out once it is whole."""

    opening: str
    reader: Reader
    parser: Parser
    bare: bool
    kept: int = 0
    whole: bool = False
    sent: bool = False
    waiting: CallPart | None = None

    @property
    def rest(self) -> str:
        """Return the text that belongs to no whole call."""
        return self.opening + self.reader.text[self.kept :]

    @property
    def broken(self) -> bool:
        """Return True if the rest, which is no call, is more than a mark in a sentence."""
        next = self.reader.text[self.kept :].lstrip()[:1]
        return self.sent or (not self.bare and (self.reader.begun or next in ("<", "{")))

    def end_call(self) -> None:
        self.opening, self.kept, self.whole = "", self.reader.at, True
        self.sent = self.reader.begun = False


class CallSearch:
    """Finds where the model begins to call a function of the request, wherever that is."""

    def __init__(self, syntax: ToolSyntax, tools: Tools):
        self._syntax, self._tools = syntax, tools

    def find(self, text: str) -> tuple[int, bool]:
        """Return the place where a call begins, and True; or the place where one may still begin,
        and False. A mark that is only mentioned begins none."""
        place = 0
        while True:
            at, mark = _first(text, self._syntax.begins, place)
            if not mark:
                return len(text) - max(overlap(text, m) for m in self._syntax.begins), False
            found = self._begins(text[at + len(mark) * (mark == self._syntax.begin) :])
            if found is not False:
                return at, found is True
            place = at + len(mark)

    def takes(self, recipient: str) -> bool:
        """Return True if a message to `recipient`, as gpt-oss writes it, is a call."""
        return recipient.startswith("functions.") or recipient in self._tools

    def _begins(self, text: str) -> bool | None:
        """Return True if a call stands at the beginning, and None if it may."""
        try:
            for part in self._syntax.parse(Reader(text), self._tools):
                return None if part is None else part.name in self._tools
        except (ValueError, TypeError, RecursionError):
            pass
        return False


def _first(text: str, marks: Iterable[str], place: int = 0) -> tuple[int, str]:
    """Return the first place of one of `marks`, and the mark; (-1, "") if there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark, place)) >= 0]
    return min(found, default=(-1, ""))


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of tools in OpenAI's form."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
