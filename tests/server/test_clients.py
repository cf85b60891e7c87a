"""Clients that people use, each against a running server. Those of Python run where they are
installed. Those of Node run in a folder named by MOEFLUX_NODE_CLIENTS, after

    npm install openai ai @ai-sdk/openai-compatible zod @openai/codex @anthropic-ai/claude-code

No client has another network than loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from mlx_moeflux import generate
from tests.server.conftest import MESSAGES, served

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


def agent(arguments: list[str], folder: Path, **environment: str) -> str:
    """What an agent prints, in an empty home."""
    assert NODE
    command = [str(Path(NODE) / "node_modules" / ".bin" / arguments[0]), *arguments[1:]]
    known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env=known | {"HOME": str(folder), "NO_PROXY": "*"} | environment,
        stdin=subprocess.DEVNULL,
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


@with_node
def test_codex_itself(lines, tiny, tmp_path):
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(
        f"""
        model = "m"
        model_provider = "local"
        [model_providers.local]
        name = "local"
        base_url = "{lines.url}/v1"
        wire_api = "responses"
        request_max_retries = 0
        stream_max_retries = 0
        """
    )
    said = agent(["codex", "exec", "--skip-git-repo-check", "--json", "import os"], tmp_path)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "turn.completed", said
    assert events[-2]["item"]["text"] == generate(*tiny, MESSAGES, max_tokens=40)


@with_node
def test_claude_code_itself(lines, tiny, tmp_path):
    said = agent(
        ["claude", "-p", "import os", "--output-format", "json"],
        tmp_path,
        ANTHROPIC_BASE_URL=lines.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="m",
        ANTHROPIC_SMALL_FAST_MODEL="m",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="40",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    result = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert result["is_error"] is False, said
    assert result["result"] == generate(*tiny, MESSAGES, max_tokens=40)
