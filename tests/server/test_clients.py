"""Clients that people use, each against a running server. Those of Python run where they are
installed. Those of Node run in a folder named by MOEFLUX_NODE_CLIENTS, after

    npm install openai ai @ai-sdk/openai-compatible zod @openai/codex @anthropic-ai/claude-code

No client has another network than loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any, Literal

import pytest

from mlx_moeflux import generate
from mlx_moeflux.server.request import Defaults
from tests.server.conftest import MESSAGES, served
from tests.server.scripted import Script, saying

pytestmark = pytest.mark.slow
NODE = os.environ.get("MOEFLUX_NODE_CLIENTS")
with_node = pytest.mark.skipif(
    not (NODE and shutil.which("node")), reason="MOEFLUX_NODE_CLIENTS names no folder of clients"
)


@pytest.fixture(scope="module")
def greedy(tiny):
    return generate(*tiny, MESSAGES, max_tokens=24)


def answer_class():
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        # Nothing else: so small a model goes on inventing fields.
        model_config = pydantic.ConfigDict(extra="forbid")
        colour: Literal["red", "green"]
        sure: bool

    return Answer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(server, method):
    langchain = pytest.importorskip("langchain_openai")
    answer = answer_class()
    model = langchain.ChatOpenAI(
        model="m", base_url=f"{server.url}/v1", api_key="none", max_retries=0, max_tokens=400
    )
    found = model.with_structured_output(answer, method=method).invoke("What colour is it?")
    assert isinstance(found, answer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON"])
def test_instructor_gets_a_model(server, mode):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    answer = answer_class()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        wrapped = instructor.from_openai(client, mode=instructor.Mode[mode])
        options = {"model": "m", "max_tokens": 400, "messages": MESSAGES, "max_retries": 0}
        if mode == "JSON":
            # Any object: the model is too small to follow the schema in the prompt.
            with pytest.raises(Exception, match="valid"):
                wrapped.chat.completions.create(response_model=answer, **options)
        else:
            found = wrapped.chat.completions.create(response_model=answer, **options)
            assert isinstance(found, answer)


@pytest.mark.filterwarnings("ignore")
def test_litellm_talks_and_streams(server, greedy):
    litellm = pytest.importorskip("litellm")
    options = {
        "model": "openai/m", "api_base": f"{server.url}/v1", "api_key": "none",
        "messages": MESSAGES, "max_tokens": 24,
    }  # fmt: skip
    assert litellm.completion(**options).choices[0].message.content == greedy
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy
    options |= {"model": "anthropic/m", "api_base": server.url}
    assert litellm.completion(**options).choices[0].message.content == greedy


def node(script: str, *arguments: str) -> object:
    """What a script of Node prints, as JSON."""
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script, *arguments],
        cwd=NODE,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@with_node
def test_openai_of_node(server, greedy):
    script = """
    import OpenAI from "openai";
    const client = new OpenAI({baseURL: process.argv[1] + "/v1", apiKey: "none", maxRetries: 0});
    const messages = [{role: "user", content: "import os"}];
    const whole = await client.chat.completions.create({model: "m", messages, max_tokens: 24});
    const stream = await client.chat.completions.create(
      {model: "m", messages, max_tokens: 24, stream: true});
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    const response = await client.responses.create(
      {model: "m", input: "import os", max_output_tokens: 24});
    let status = 0;
    try { await client.chat.completions.create({model: "m", messages, temperature: 9}); }
    catch (error) { status = error.status; }
    console.log(JSON.stringify(
      [whole.choices[0].message.content, text, response.output_text, status]));
    """
    assert node(script, server.url) == [greedy, greedy, greedy, 400]


@with_node
def test_the_ai_sdk(server, greedy):
    script = """
    import {generateText, streamText, tool} from "ai";
    import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
    import {z} from "zod";
    const provider = createOpenAICompatible({name: "local", baseURL: process.argv[1] + "/v1"});
    const model = provider("m"), prompt = "import os";
    const whole = await generateText({model, prompt, maxOutputTokens: 24, maxRetries: 0});
    let text = "";
    const parts = streamText({model, prompt, maxOutputTokens: 24, maxRetries: 0}).textStream;
    for await (const part of parts) text += part;
    const look = tool({description: "d", inputSchema: z.object({n: z.enum(["a", "b"])})});
    const called = await generateText({
      model, prompt, tools: {look}, toolChoice: "required", maxOutputTokens: 500, maxRetries: 0});
    const streamed = streamText({
      model, prompt, tools: {look}, toolChoice: "required", maxOutputTokens: 500, maxRetries: 0});
    const names = [];
    for await (const part of streamed.fullStream)
      if (part.type === "tool-call") names.push(part.toolName);
    console.log(JSON.stringify([whole.text, text, called.toolCalls[0].toolName, names[0]]));
    """
    assert node(script, server.url) == [greedy, greedy, "look", "look"]


def agent(arguments: list[str], folder: Path, asked: str = "", **environment: str) -> str:
    """Run an agent in an empty home; return all that it prints. asked: Its standard input."""
    assert NODE
    command = [str(Path(NODE) / "node_modules" / ".bin" / arguments[0]), *arguments[1:]]
    known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env=known | {"HOME": str(folder), "NO_PROXY": "*"} | environment,
        input=asked,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


@pytest.fixture
def lines(tiny, monkeypatch):
    """A server whose replies end with their line, and whose prompts are the last message of a user:
    what agents say of themselves is longer than the model's context."""
    model, tokenizer = tiny
    ends = {i for i in range(model.config.vocab_size) if "\n" in tokenizer.decode([i])}
    monkeypatch.setattr(tokenizer, "eos_token_ids", tokenizer.eos_token_ids | ends)
    last = "(messages | selectattr('role', 'equalto', 'user') | list)[-1].content[-9:]"
    template = f"# user: {{{{ {last} }}}}\ndef{{# <tool_call></tool_call> #}}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with served(model, tokenizer) as server:
        yield server


def configure_codex(url: str, folder: Path, more: str = "") -> None:
    """Write Codex' configuration into an empty home."""
    (folder / ".codex").mkdir()
    (folder / ".codex" / "config.toml").write_text(
        f"""
        model = "m"
        model_provider = "local"
        [model_providers.local]
        name = "local"
        base_url = "{url}/v1"
        wire_api = "responses"
        request_max_retries = 0
        stream_max_retries = 0
        {more}
        """
    )


def codex(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run Codex with one question; return its events."""
    said = agent(["codex", "exec", *arguments], folder)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert events, said
    return events


def claude(
    url: str, folder: Path, *arguments: str, tokens: int = 1000, asked: str = "", **more: str
) -> dict[str, Any]:
    """Run Claude Code with one question; return its result. more: Of its environment."""
    form = "stream-json" if asked else "json"
    said = agent(
        ["claude", "-p", *arguments, "--output-format", form],
        folder,
        asked,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="m",
        ANTHROPIC_SMALL_FAST_MODEL="m",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS=str(tokens),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **more,
    )
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert found, said
    return found[-1]


@with_node
def test_codex_itself(lines, tiny, tmp_path):
    configure_codex(lines.url, tmp_path)
    events = codex(tmp_path, "--skip-git-repo-check", "--json", "import os")
    assert events[-1]["type"] == "turn.completed", events
    assert events[-2]["item"]["text"] == generate(*tiny, MESSAGES, max_tokens=40)


@with_node
def test_claude_code_itself(lines, tiny, tmp_path):
    result = claude(lines.url, tmp_path, "import os", tokens=40)
    assert result["is_error"] is False, result
    assert result["result"] == generate(*tiny, MESSAGES, max_tokens=40)


# The end of each message, and whether there are tools: whole prompts of agents are too long.
ENDS = (
    "{% if tools %}with tools{% endif %}{% for m in messages %}\n# {{ m.role }}: "
    "{{ m.content[-250:] }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% endfor %}\n# assistant: {# <tool_call> <function= <parameter= #}"
)


class Turns(Script):
    """Gives each turn of an agent its text; requests besides have no tools."""

    def take(self, tokenizer: Any, job: Any) -> None:
        if "with tools" in tokenizer.decode(job.prompt):
            super().take(tokenizer, job)
        else:
            Script("none").take(tokenizer, job)


@pytest.fixture
def acting(tiny, monkeypatch):
    """A server whose model takes the turns that a test gives it."""
    model, tokenizer = tiny
    monkeypatch.setattr(tokenizer, "chat_template", ENDS)

    def start(script: Turns, **options: Any):
        return saying(model, tokenizer, script, **{"tool_parser": "qwen3_xml", **options})

    return start


def written(between: str, around: str = "{}") -> Any:
    """Return what writes a call: `between` is the form of a key and its value."""

    def call(name: str, **arguments: str) -> str:
        inner = "".join(between.format(*pair) for pair in arguments.items())
        return around.format(name=name, inner=inner)

    return call


CALLS = {
    "qwen3_xml": written(
        "<parameter={0}>\n{1}\n</parameter>\n",
        "<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>",
    ),
    "glm4": written(
        "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n",
        "<tool_call>{name}\n{inner}</tool_call>",
    ),
    "minimax_m2": written(
        '<parameter name="{0}">{1}</parameter>\n',
        '<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>',
    ),
    "hermes": lambda name, **arguments: (
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    ),
}
call = CALLS["qwen3_xml"]
CODEX = ("--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox")


def png() -> bytes:
    """A picture of one point."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">2I5B", 1, 1, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0abc")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


NOTES = '''
"""A server of tools on standard input and output: `note` writes its arguments to a file."""
import json, sys
SCHEMA = {"type": "object", "properties": {
    "text": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "kind": {"type": "string"}},
    "required": ["text", "kind"]}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, result = asked["method"], {}
    if method == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"],
                  "capabilities": {"tools": {}}, "serverInfo": {"name": "notes", "version": "1"}}
    elif method == "tools/list":
        tool = {"name": "note", "description": "Keep a note.", "inputSchema": SCHEMA}
        result = {"tools": [tool]}
    elif method == "tools/call":
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps(asked["params"]["arguments"]) + "\\n")
        result = {"content": [{"type": "text", "text": "noted"}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
'''


@pytest.fixture
def codex_home(tmp_path):
    """A function that configures Codex for a server, in a folder with a picture and a tool."""

    def configure(url: str) -> Path:
        configure_codex(
            url,
            tmp_path,
            f"""
            [mcp_servers.notes]
            command = "{sys.executable}"
            args = ["{tmp_path}/notes.py", "{tmp_path}/notes.jsonl"]
            """,
        )
        return tmp_path

    (tmp_path / "notes.py").write_text(NOTES)
    (tmp_path / "dot.png").write_bytes(png())
    return configure


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def of_codex(events: list[dict[str, Any]]) -> list[str]:
    """Return the model's messages, and the type of the last event."""
    items = [event.get("item", {}) for event in events if event["type"] == "item.completed"]
    said = [item["text"] for item in items if item["type"] == "agent_message"]
    return [*said, events[-1]["type"]]


@with_node
@pytest.mark.parametrize("syntax", CALLS)
def test_claude_code_writes_nothing_of_a_call_that_is_cut(acting, tiny, tmp_path, syntax):
    """Half a file is no file; the next turn of the session is answered."""
    text = CALLS[syntax]("Write", file_path=str(tmp_path / "half.py"), content="one()\ntwo()\n")
    half = text[: text.index("two")]
    limit = len(tiny[1].encode(half, add_special_tokens=False))
    script = Turns(text, "Done.")
    with acting(script, tool_parser=syntax) as server:
        way = ("--permission-mode", "acceptEdits")
        result = claude(server.url, tmp_path, "write half.py", *way, tokens=limit)
        assert (result["is_error"], result["result"]) == (False, "Done."), result
        assert not (tmp_path / "half.py").exists()
        script.texts = ["Still here."]
        result = claude(server.url, tmp_path, "--continue", "and now", tokens=limit)
        assert (result["is_error"], result["result"]) == (False, "Still here."), result
        script.texts = [CALLS[syntax]("Write", file_path=str(tmp_path / "whole.py"), content="a")]
        script.texts.append("Written.")
        result = claude(server.url, tmp_path, "--continue", "again", *way)
    assert (result["is_error"], result["result"]) == (False, "Written."), result
    assert (tmp_path / "whole.py").read_text() == "a"


@with_node
@pytest.mark.parametrize("syntax", CALLS)
def test_codex_runs_nothing_of_a_call_that_is_cut(acting, tiny, codex_home, syntax):
    text = CALLS[syntax]("exec_command", cmd="touch half.txt; touch whole.txt")
    limit = len(tiny[1].encode(text[: text.index("; touch")], add_special_tokens=False))
    script = Turns(text)
    defaults = Defaults(max_tokens=limit)
    with acting(script, tool_parser=syntax, defaults=defaults) as server:
        folder = codex_home(server.url)
        codex(folder, *CODEX, "write")
        assert not (folder / "half.txt").exists()
        script.texts = ["Still here."]
        again = codex(folder, "resume", "--last", *CODEX, "and now")
    assert of_codex(again) == ["Still here.", "turn.completed"]
    assert not (folder / "half.txt").exists()


@with_node
def test_claude_code_goes_on_after_an_image(acting, tmp_path):
    (tmp_path / "dot.png").write_bytes(png())
    script = Turns(call("Read", file_path=str(tmp_path / "dot.png")), "Seen.")
    with acting(script) as server:
        result = claude(server.url, tmp_path, "look at dot.png")
        assert (result["is_error"], result["result"]) == (False, "Seen."), result
        assert "# tool: [image: not readable by this model]" in script.prompts[-1]
        script.texts = ["Still here."]
        result = claude(server.url, tmp_path, "--continue", "and now")
    assert (result["is_error"], result["result"]) == (False, "Still here."), result
    assert "# tool: [image: not readable by this model]" in script.prompts[-1]


@with_node
def test_claude_code_is_told_of_an_image_in_a_question(acting, tmp_path):
    """The refusal names the block in Anthropic's form: it tells the model and asks again."""
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(png()).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
    asked = {"type": "user", "message": {"role": "user", "content": content}}
    script = Turns("I cannot see it.")
    with acting(script) as server:
        way = ("--input-format", "stream-json", "--verbose")
        result = claude(server.url, tmp_path, *way, asked=json.dumps(asked) + "\n")
    assert (result["is_error"], result["result"]) == (False, "I cannot see it."), result
    assert "what is it?" in script.prompts[-1]


@with_node
def test_codex_goes_on_after_an_image(acting, codex_home):
    script = Turns(call("view_image", path="dot.png"), "Seen.")
    with acting(script) as server:
        folder = codex_home(server.url)
        assert of_codex(codex(folder, *CODEX, "look")) == ["Seen.", "turn.completed"]
        assert "# tool: [image: not readable by this model]" in script.prompts[-1]
        (error, _) = codex(folder, *CODEX, "-i", "dot.png", "--", "what is it?")[-2:]
        assert "this model reads text, no image" in error["message"]
        script.texts = ["Still here."]
        again = codex(folder, "resume", "--last", *CODEX, "go on without it")
    assert of_codex(again) == ["Still here.", "turn.completed"]
    assert "[image: not readable by this model]" in script.prompts[-1]


TEXTS = {"007": "007", '{"name": 1}': '{"name": 1}', "42": "42", "null": None}
"""Text that a model writes for one that may be null -> value that the tool gets."""


@with_node
def test_codex_hands_over_a_nullable_text_as_it_is(acting, codex_home):
    calls = [call("mcp__notes__note", text=text, kind=text) for text in TEXTS]
    with acting(Turns(*calls, "Noted.")) as server:
        folder = codex_home(server.url)
        assert of_codex(codex(folder, *CODEX, "note")) == ["Noted.", "turn.completed"]
    assert notes(folder) == [{"text": TEXTS[text], "kind": text} for text in TEXTS]


@with_node
def test_claude_code_hands_over_a_nullable_text_as_it_is(acting, tmp_path):
    (tmp_path / "notes.py").write_text(NOTES)
    arguments = [str(tmp_path / "notes.py"), str(tmp_path / "notes.jsonl")]
    servers = {"mcpServers": {"notes": {"command": sys.executable, "args": arguments}}}
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    calls = [call("mcp__notes__note", text=text, kind=text) for text in TEXTS]
    way = ("--mcp-config", "servers.json", "--allowedTools", "mcp__notes__note")
    with acting(Turns(*calls, "Noted.")) as server:
        result = claude(server.url, tmp_path, "note", *way, ENABLE_TOOL_SEARCH="0")
    assert (result["is_error"], result["result"]) == (False, "Noted."), result
    assert notes(tmp_path) == [{"text": TEXTS[text], "kind": text} for text in TEXTS]
