"""Turns lists of three numbers into changes of JSON texts, bytes, templates and command lines.

Numbers are what hypothesis draws and shrinks; each means a place, a kind of change, and a value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Ops = Sequence[Sequence[int]]

# As JSON, because some cannot be written otherwise.
VALUES = (
    *("null", "true", "false", "0", "-0.0", "1", "2", "3", "7", "64", "-1", "0.5", "1e-320"),
    *("1e308", "NaN", "Infinity", "-Infinity", "1" + "0" * 19, "-1" + "0" * 19, "9" * 5000),
    *(str(2**31), str(2**32), str(2**63 - 1), str(-(2**63)), str(2**64), "1" + "0" * 400),
    *('""', '"x"', '"0"', '"1e19"', '"\\ud800"', '"a\\u0000b"', '"../x"', '"/etc/hostname"'),
    *(json.dumps("x" * 10_000), json.dumps("\n" * 400), '"auto"', '"default"', '"F32"', '"BPE"'),
    *("[]", "{}", "[1]", "[0, 0]", '["a"]', '{"a": 1}', '{"type": "x"}', "[[[[1]]]]", "[null]"),
    *("[" * 300 + "]" * 300, "[" + "1," * 3000 + "1]", "[-1, 2.5]", '{"": {}}', "[1e19, 5]"),
)
_MARK = "\uffff"


def first(ops: Ops) -> Sequence[int]:
    """Return the op that chooses what is mutated, and how."""
    return ops[0] if ops else (1, 1, 1)


def json_text(document: Any, ops: Ops) -> bytes:
    """Return a JSON document with a change for each op, perhaps no JSON any more."""
    document = json.loads(json.dumps(document))
    raw: list[str] = []
    for where, how, what in ops:
        places = list(_places(document, ()))
        if not places:
            break
        place = places[where % len(places)]
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        last = place[-1]
        match how % 6:
            case 0 if isinstance(holder, dict):
                del holder[last]
            case 1 if isinstance(holder, dict):
                holder[("new_key", "", "\ud800", "__metadata__")[what % 4]] = holder[last]
            case 2 if type(holder[last]) is int:
                holder[last] += (1, -1, holder[last], -2 * holder[last], 2**16)[what % 5]
            case 3:
                other = places[what % len(places)]
                if len(other) == len(place) == 1:
                    holder[last], document[other[0]] = document[other[0]], holder[last]
            case _:
                holder[last] = f"{_MARK}{len(raw)}{_MARK}"
                raw.append(VALUES[what % len(VALUES)])
    text = json.dumps(document)
    for i, value in enumerate(raw):
        text = text.replace(json.dumps(f"{_MARK}{i}{_MARK}"), value)
    where, how, what = ops[-1] if ops else (0, 0, 0)
    match how % 40:
        case 6:
            text = text[: where % (len(text) + 1)]
        case 7:
            text = "[" * 100_000 + text
        case 8:
            text = text[:1] + f'"twice": 1, "twice": {VALUES[what % len(VALUES)]}, ' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _places(value: Any, above: tuple) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:4]))
    else:
        return
    for key, one in items:
        yield (*above, key)
        yield from _places(one, (*above, key))


def changed_bytes(data: bytes, ops: Ops, *, within: int | None = None) -> bytes:
    """Return `data` with a change for each op, in its first `within` bytes."""
    out = bytearray(data)
    within = min(within or len(data), len(data))
    for where, how, what in ops:
        at = (where * 65537 + what) % max(within, 1) if where > 500 else where % max(within, 1)
        number = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, what, 10**9)[what % 8]
        match how % 8:
            case 0:
                out[at : at + 1] = bytes([what % 256])
            case 1:
                out[at : at + 4] = (number % 2**32).to_bytes(4, "little")
            case 2:
                out[at : at + 8] = number.to_bytes(8, "little")
            case 3:
                out[at : at + 1] = bytes([(out[at] if at < len(out) else 0) ^ (1 << what % 8)])
            case 4:
                del out[at : at + 1 + what % 16]
            case 5:
                out[at:at] = bytes(out[at : at + 1 + what % 64])
            case 6:
                del out[(where * 65537 + what) % (len(out) + 1) :]
            case 7:
                out[at : at + 2] = b"\xff\xfe"
    return bytes(out)


TEXTS = (
    "'a'", "10", "messages", "messages[0].content", "messages[0].role", "10 ** 9", "none", "loop",
    "namespace(x=1)", "range(9999)", "[]", "{}", "tools", "bos_token", "2 ** 63", "-1", "1.5",
    "''", "'\\ud800'", "'%s'", "'{}'", "''.__class__", "cycler", "self", "varargs", "1e400",
)  # fmt: skip
OPERATORS = (
    "{a} * {b}", "{a} ~ {b}", "{a} ** {b}", "{a} % {b}", "{a} + {b}", "{a}[{b}]", "{a}.{n}",
    "{a} | {f}", "{a} | {f}({b})", "{a}.{m}({b})", "{a} in {b}", "{a} is {t}", "not {a}", "-{a}",
    "{a} if {b} else {a}", "({a}, {b})", "[{a}] * {b}", "{{'k': {a}}}", "{a}.format({b})",
    "{a} // {b}", "{a}[:{b}]", "{a}({b})",
)  # fmt: skip
NAMES = ("content", "__class__", "x", "append", "items", "mro")
METHODS = ("center", "join", "zfill", "split", "replace", "ljust", "encode", "index", "strip")
FILTERS = (
    "tojson", "indent", "join", "center", "length", "list", "trim", "upper", "batch", "sort",
    "map", "select", "groupby", "format", "wordwrap", "xmlattr", "pprint", "string", "int", "sum",
    "nonesuch",
)  # fmt: skip
TESTS = ("defined", "string", "mapping", "iterable", "nonesuch", "divisibleby(0)")
STATEMENTS = (
    "{{{{ {e} }}}}", "{{% for m in {e} %}}{s}{{% endfor %}}", "{{% if {e} %}}{s}{{% endif %}}",
    "{{% set x = {e} %}}{s}", "{{% macro f(a) %}}{s}{{% endmacro %}}{{{{ f({e}) }}}}",
    "{{% break %}}{s}", "{{% continue %}}{s}", "{{% generation %}}{s}{{% endgeneration %}}",
    "{{% filter {f} %}}{s}{{% endfilter %}}", "{{% call {e} %}}{s}{{% endcall %}}", "{{# {e} #}}",
    "{{{{ raise_exception({e}) }}}}", "{{{{ strftime_now({e}) }}}}", "{{% include {e} %}}",
    "{{% extends {e} %}}", "{{% block b %}}{s}{{% endblock %}}", "{{% raw %}}{s}", "{{{{ {e}",
    "{{%", "{{{{ lipsum({e}) }}}}", "{{% for i in range(99999) %}}{s}{{% endfor %}}",
    "{{% macro g() %}}{{{{ g() }}}}{{% endmacro %}}{{{{ g() }}}}", "{{% import {e} as y %}}{s}",
)  # fmt: skip


def template(ops: Ops) -> str:
    """Return a template that an op after the other wraps into a statement."""
    text, expression = "x", TEXTS[ops[0][0] % len(TEXTS)] if ops else ""
    for where, how, what in ops:
        expression = OPERATORS[how % len(OPERATORS)].format(
            a=expression,
            b=TEXTS[what % len(TEXTS)],
            n=NAMES[where % len(NAMES)],
            m=METHODS[where % len(METHODS)],
            f=FILTERS[where % len(FILTERS)],
            t=TESTS[where % len(TESTS)],
        )
        statement = STATEMENTS[(what // 7) % len(STATEMENTS)]
        text = statement.format(e=expression, s=text, f=FILTERS[what % len(FILTERS)])
    return text


# Words only: a command writes into the folder of its case, and to no other place.
WORDS = (
    "", "0", "-1", "1", "2", "0.5", "nan", "inf", "-inf", "1e19", "9" * 5000, "x", "é", "auto",
    "50%", "0%", "-5%", "1e400%", "2GB", "9" * 30 + "GB", "GB", "{}", "[]", "null", '{"a": 1}',
    '{"messages": 1}', "{", "[" * 5000, "true", "none", "ahead", "last", "lfu", "lru", "mmap",
    "memory", "direct", "pread", "x" * 3000, "\udcff", "a b", "--", "-", "4", "8", "64", "1_000",
    "١", "+1", " 1", "1 ", "0x10", "default", "F32", "state", "trace", "tuning.json", "here",
)  # fmt: skip


def command_line(options: Sequence[str], ops: Ops) -> list[str]:
    """Return options with words."""
    words: list[str] = []
    for where, how, what in ops:
        words.append(options[where % len(options)])
        if how % 24 == 3:
            words[-1] += f"={WORDS[what % len(WORDS)]}"
            continue
        words += [WORDS[(what + i) % len(WORDS)] for i in range((1, 1, 1, 1, 0, 2)[how % 6])]
    return words
