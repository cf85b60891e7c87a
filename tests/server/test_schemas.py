"""Oracle: the package jsonschema, on replies to random schemas."""

from __future__ import annotations

import json
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from statistics import median

import pytest

from tests.server.conftest import MESSAGES

LOG = logging.getLogger(__name__)
WORDS = ["name", "kind", "size", "next", "items", "path", "ok", "größe", "a b", "x-1"]


class Schemas:
    """Random schemas of the kinds that clients send."""

    def __init__(self, seed):
        self._draw = random.Random(seed)

    def whole(self):
        schema = self.object(3)
        if self._draw.random() < 0.3:
            schema["$defs"] = {"part": self.object(1)}
            schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        return schema

    def any(self, depth):
        kinds = [self.text, self.integer, self.number, self.enum, self.flag, self.nullable]
        if depth:
            kinds += [self.object, self.array, self.choice] * 2
        return self._draw.choice(kinds)(depth - 1)

    def object(self, depth):
        names = self._draw.sample(WORDS, self._draw.randint(1, 4))
        properties = {name: self.any(depth) for name in names}
        required = [name for name in names if self._draw.random() < 0.8]
        schema = {"type": "object", "properties": properties, "required": required}
        if self._draw.random() < 0.9:
            schema["additionalProperties"] = False
        return schema

    def array(self, depth):
        low = self._draw.randint(0, 2)
        bounds = {"minItems": low, "maxItems": low + self._draw.randint(0, 2)}
        return {"type": "array", "items": self.any(depth), **bounds}

    def choice(self, depth):
        return {"anyOf": [self.any(depth) for _ in range(self._draw.randint(2, 3))]}

    def text(self, depth):
        low = self._draw.randint(0, 3)
        return self._draw.choice(
            [
                {"type": "string", "minLength": low, "maxLength": low + 6},
                {"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]{1,3})?$"},
                {"type": "string", "format": "date"},
            ]
        )

    def integer(self, depth):
        low = self._draw.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + self._draw.randint(0, 500)}

    def number(self, depth):
        return {"type": "number", "minimum": 0, "maximum": self._draw.choice([1, 1.5, 100])}

    def enum(self, depth):
        values = ["red", "grün", 3, None, True, 'a "quoted" text', [1], {"a": 1}]
        return {"enum": self._draw.sample(values, self._draw.randint(1, 4))}

    def flag(self, depth):
        return {"type": "boolean"}

    def nullable(self, depth):
        return {"type": ["string", "null"], "maxLength": 5}


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_replies_that_end_by_themselves_are_valid(server, count):
    jsonschema = pytest.importorskip("jsonschema")
    formats = jsonschema.FormatChecker()

    @formats.checks("date", raises=ValueError)
    def is_date(value):
        if not isinstance(value, str):
            return True
        # RFC 3339 has a year 0, a leap year, which Python's dates lack.
        return bool(date.fromisoformat("2000" + value[4:] if value[:4] == "0000" else value))

    schemas = [Schemas(seed).whole() for seed in range(count)]

    def ask(seed):
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schemas[seed]}}
        options = {"response_format": form, "max_tokens": 700, "temperature": 0.8, "seed": seed}
        return server.chat(**options)["choices"][0]

    with ThreadPoolExecutor(32) as pool:
        choices = list(pool.map(ask, range(count)))
    ended = 0
    for schema, choice in zip(schemas, choices, strict=True):
        if choice["finish_reason"] == "stop":
            ended += 1
            value = json.loads(choice["message"]["content"])
            jsonschema.validate(value, schema, format_checker=formats)
    LOG.info("%d of %d replies ended by themselves, all valid", ended, count)
    assert ended >= 0.75 * count


@pytest.mark.slow
def test_what_a_schema_costs_a_token(server, monkeypatch):
    """Processor time of the engine's thread, in turns; the schema has no end within the reply."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object"}}}}
    schema["properties"]["a"]["minItems"] = 1000
    schema |= {"required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    step, spent = server.service.engine._step, [0.0]

    def timed():
        begun = time.thread_time()
        step()
        spent[0] += time.thread_time() - begun

    monkeypatch.setattr(server.service.engine, "_step", timed)

    def seconds(**options):
        before = spent[0]
        reply = server.chat(messages=MESSAGES, max_tokens=64, **options)
        assert reply["usage"]["completion_tokens"] == 64
        return (spent[0] - before) / 64

    seconds(response_format=form)
    pairs = [(seconds(), seconds(response_format=form)) for _ in range(5)]
    LOG.info(
        "a schema costs %.2f ms a token of %.2f ms",
        1e3 * median(b - a for a, b in pairs),
        1e3 * median(a for a, _ in pairs),
    )
    assert median(b / a for a, b in pairs) < 2
