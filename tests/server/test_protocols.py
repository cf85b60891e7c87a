"""Oracle: the official clients, which parse what the server says; texts are those of generate()."""

from __future__ import annotations

import json

import pytest

from mlx_moeflux import generate
from tests.server.conftest import MESSAGES, served

# Nothing else: so small a model goes on inventing arguments.
TOOL = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
TOOL |= {"additionalProperties": False}


@pytest.fixture(scope="module")
def openai(server):
    module = pytest.importorskip("openai")
    with module.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(server):
    module = pytest.importorskip("anthropic")
    with module.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def greedy(tiny):
    return generate(*tiny, MESSAGES, max_tokens=12)


def test_openai_lists_and_retrieves_models(openai):
    assert [model.id for model in openai.models.list()] == ["tiny"]
    assert openai.models.retrieve("tiny").object == "model"


def test_openai_chats(openai, greedy):
    reply = openai.chat.completions.create(model="m", messages=MESSAGES, max_tokens=12)
    assert reply.choices[0].message.content == greedy
    chunks = openai.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy


def test_openai_gets_errors_of_its_own(openai):
    import openai as module

    with pytest.raises(module.BadRequestError, match="temperature") as caught:
        openai.chat.completions.create(model="m", messages=MESSAGES, temperature=2.5)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("given", ["import os\n", ["import os\n"], "ids", "list of ids"])
def test_openai_completes(openai, tiny, given):
    ids = tiny[1].encode("import os\n")
    prompt = {"ids": ids, "list of ids": [ids]}.get(given if isinstance(given, str) else "", given)
    expected = generate(*tiny, "import os\n", max_tokens=6)
    reply = openai.completions.create(model="m", prompt=prompt, max_tokens=6, logprobs=2)
    (choice,) = reply.choices
    assert choice.text == expected
    assert "".join(choice.logprobs.tokens) == expected
    assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    chunks = list(
        openai.completions.create(
            model="m", prompt=prompt, max_tokens=6, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected
    assert chunks[-1].usage.completion_tokens == 6


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt": ""}, {"prompt": []}, {"prompt": [4096]}, {"prompt": [True]},
        {"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}, {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "best_of": 2}, {"prompt": "a", "logprobs": 21},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_completions_are_400(server, body):
    status, reply = server.ask("/v1/completions", body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


def test_tokens_there_and_back(server, tiny):
    status, reply = server.ask("/tokenize", {"content": "def f(x): # é"})
    assert status == 200
    assert reply["tokens"] == tiny[1].encode("def f(x): # é", add_special_tokens=False)
    assert server.ask("/detokenize", reply) == (200, {"content": "def f(x): # é"})
    for path, body in (
        ("/tokenize", {}), ("/tokenize", {"content": 5}), ("/detokenize", {"tokens": [4096]}),
        ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": ["a"]}),
    ):  # fmt: skip
        assert server.ask(path, body)[0] == 400


def test_properties_and_metrics(server):
    status, props = server.ask("/props")
    assert (status, props["model"], props["vocabulary"]) == (200, "tiny", 4096)
    assert props["layers"] == len(server.service.model.layers)
    before = samples(server)
    server.chat(max_tokens=3)
    server.ask("/v1/chat/completions", {})
    after = samples(server)

    def grown(name):
        return after[f"mlx_moeflux_{name}"] - before.get(f"mlx_moeflux_{name}", 0)

    assert grown("completion_tokens_total") == 3
    assert grown("prompt_tokens_total") > 0
    server.chat(max_tokens=3)
    assert samples(server)["mlx_moeflux_prompt_cache_hits_total"] > 0
    assert grown('requests_total{path="/v1/chat/completions",status="200"}') == 1
    assert grown('requests_total{path="/v1/chat/completions",status="400"}') == 1
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown('request_seconds_bucket{le="+Inf"}') == 1
    assert grown("expert_lookups_total") > 0
    for name in ("replies", "prompts_waiting", "prompts_reading", "prompt_layers", "prompt_share"):
        assert after[f"mlx_moeflux_{name}"] == 0
    assert after["mlx_moeflux_expert_bytes_read_total"] > 0
    assert after["mlx_moeflux_expert_memory_bytes"] == server.service.model.store.nbytes
    assert after["mlx_moeflux_prompt_cache_bytes_written_total"] == 0  # it has no directory


def samples(server):
    status, text = server.ask("/metrics")
    assert status == 200
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
        else:
            assert line.split()[1] in ("HELP", "TYPE")
    return found


# Responses


def test_openai_responds(openai, greedy):
    reply = openai.responses.create(model="m", input=MESSAGES[0]["content"], max_output_tokens=12)
    assert (reply.output_text, reply.status) == (greedy, "incomplete")
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 12
    with openai.responses.stream(
        model="m", input=MESSAGES[0]["content"], max_output_tokens=12
    ) as stream:
        kinds, text = [], ""
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == greedy
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip


def test_codex_gets_the_events_that_it_reads(server):
    """A request in Codex' form: history of a call, groups of tools, tools of the provider's."""
    function = {"type": "function", "name": "look", "parameters": TOOL, "strict": False}
    body = {
        "model": "gpt-5-codex",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [
                {"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "import os"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": None, "content": None},
            {"type": "function_call", "name": "look", "arguments": '{"n": 1}', "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "two"},
        ],
        "tools": [
            {"type": "namespace", "name": "files", "description": "d", "tools": [function]},
            {"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {}},
        ],
        "tool_choice": "required", "parallel_tool_calls": False, "store": False, "stream": True,
        "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "max_output_tokens": 400,
    }  # fmt: skip
    events = server.stream("/v1/responses", body)
    kinds = [name for name, _ in events]
    assert kinds == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    parts = [data["delta"] for name, data in events if name.endswith("arguments.delta")]
    assert len(parts) > 1
    del events[4 : 3 + len(parts)], kinds[4 : 3 + len(parts)]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    item = events[5][1]["item"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "look", "files")
    assert json.loads(item["arguments"])["n"] in (1, 2)
    assert item["arguments"] == "".join(parts)
    done = events[-1][1]["response"]
    assert (done["status"], done["output"]) == ("completed", [item])
    assert done["usage"]["total_tokens"] > 0


def test_groups_may_have_functions_of_one_name(server):
    function = {"type": "function", "name": "look", "parameters": TOOL}
    groups = [{"type": "namespace", "name": name, "tools": [function]} for name in ("a", "b")]
    history = [
        {"role": "user", "content": "import os"},
        {"type": "function_call", "namespace": "b", "name": "look", "arguments": "{}",
         "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "two"},
    ]  # fmt: skip
    body = {"input": history, "tools": groups, "tool_choice": "required"}
    body |= {"max_output_tokens": 400, "parallel_tool_calls": False}
    status, reply = server.ask("/v1/responses", body)
    assert status == 200
    (item,) = reply["output"]
    assert item["name"] == "look"
    assert item["namespace"] in ("a", "b")


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 4000}, "response.failed"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4000}, "error"),
    ],
)
def test_a_stream_that_fails_says_so_in_its_protocol(tiny, path, body, last):
    with served(*tiny, seconds=0.5) as server:
        events = server.stream(path, {**body})
    name, data = events[-1]
    assert (name, data["type"]) == (last, last)
    error = data["response"]["error"] if last == "response.failed" else data["error"]
    assert "took longer than 0.5 s" in error["message"]


def test_a_response_goes_on_from_the_same_prompt_as_a_chat(server):
    """The history of a response renders to the messages of a chat."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = server.chat(
        messages=[
            {"role": "system", "content": "s"}, *MESSAGES,
            {"role": "assistant", "content": "well", "tool_calls": [call]},
            {"role": "tool", "content": "two", "tool_call_id": "c1"},
        ]
    )  # fmt: skip
    items = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "two"}]},
    ]  # fmt: skip
    body = {"instructions": "s", "input": items, "max_output_tokens": 8}
    status, reply = server.ask("/v1/responses", body)
    assert status == 200
    assert reply["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    said = reply["output"][0]["content"][0]["text"]
    assert said == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "body",
    [
        {}, {"input": 5}, {"input": "a", "previous_response_id": "resp_1"},
        {"input": "a", "background": True}, {"input": "a", "truncation": "middle"},
        {"input": "a", "tools": [{}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}]},
        {"input": "a", "max_output_tokens": 2**63}, {"input": "a", "max_tokens": 5},
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_responses_are_400(server, body):
    status, reply = server.ask("/v1/responses", body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


# Anthropic's messages


def test_anthropic_talks(anthropic, greedy):
    reply = anthropic.messages.create(model="claude-x", max_tokens=12, messages=MESSAGES)
    assert (reply.content[0].text, reply.stop_reason) == (greedy, "max_tokens")
    assert reply.usage.output_tokens == 12
    with anthropic.messages.stream(model="claude-x", max_tokens=12, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == greedy
        final = stream.get_final_message()
    assert final.content[0].text == greedy
    assert final.usage.output_tokens == 12
    stopped = anthropic.messages.create(
        model="m", max_tokens=12, messages=MESSAGES, stop_sequences=[greedy[5:8]]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", greedy[5:8])


@pytest.mark.parametrize(
    "choice",
    [pytest.param({"type": "any"}, marks=pytest.mark.slow), {"type": "tool", "name": "look"}],
)
def test_anthropic_calls_a_tool(anthropic, choice):
    tools = [{"name": "look", "description": "d", "input_schema": TOOL}]
    choice = {**choice, "disable_parallel_tool_use": True}
    options = {"model": "m", "max_tokens": 400, "tools": tools, "tool_choice": choice}
    messages: list = list(MESSAGES)
    reply = anthropic.messages.create(messages=messages, **options)
    (block,) = reply.content
    assert (block.type, block.name, reply.stop_reason) == ("tool_use", "look", "tool_use")
    assert block.input["n"] in (1, 2)
    messages += [
        {"role": "assistant", "content": [
            block.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": [
                {"type": "text", "text": "two"}]},
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    with anthropic.messages.stream(messages=messages, **options) as stream:
        final = stream.get_final_message()
    assert final.content[0].input["n"] in (1, 2)


def test_anthropic_gets_errors_of_its_own(anthropic, server):
    import anthropic as module

    hot = {"temperature": 1.5}
    with pytest.raises(module.BadRequestError, match="temperature"):
        anthropic.messages.create(model="m", max_tokens=1, messages=MESSAGES, extra_body=hot)
    status, reply = server.ask("/v1/messages", {"messages": MESSAGES}, headers={"Host": "evil"})
    assert (status, reply["type"], reply["error"]["type"]) == (403, "error", "permission_error")


@pytest.mark.parametrize(
    "body",
    [
        {}, {"max_tokens": 0}, {"max_tokens": True}, {"messages": []}, {"system": 5},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "url", "url": "http://127.0.0.1:1/"}}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "a"}]}, {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "maybe"}}, {"temperature": 1.01}, {"n": 2},
        {"mcp_servers": [{"url": "http://a"}]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_messages_are_400(server, body):
    whole = {"messages": MESSAGES, "max_tokens": 2, **body} if body else {}
    status, reply = server.ask("/v1/messages", whole)
    assert (status, reply["type"]) == (400, "error")
    assert reply["error"]["type"] == "invalid_request_error"


def claude_code(turn, *texts):
    """A request in Claude Code's form; the billing line changes with every turn."""
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": [{"type": "text", "text": text, **mark}]}
        for i, text in enumerate(texts)
    ]
    line = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn:05x};"
    system = [
        {"type": "text", "text": line},
        {"type": "text", "text": "You are Code.", **mark},
    ]
    return {
        "model": "claude-sonnet-4-5", "max_tokens": 4, "system": system, "messages": messages,
        "metadata": {"user_id": f"u{turn}"}, "thinking": {"type": "disabled"}, "stream": True,
        "tools": [{"name": "look", "description": "d", "input_schema": TOOL}],
        "context_management": {"edits": []},
    }  # fmt: skip


def test_claude_code_reads_on_although_its_line_changes(server):
    long = "read" + " the long file" * 20
    first = server.stream("/v1/messages?beta=true", claude_code(1, long))
    kinds = [name for name, _ in first]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    tokens = first[0][1]["message"]["usage"]["input_tokens"]
    second = server.stream("/v1/messages?beta=true", claude_code(2, long, "done", "go on"))
    usage = second[-2][1]["usage"]
    assert usage["cache_read_input_tokens"] >= tokens - 3
    assert usage["input_tokens"] < 30


def test_claude_code_is_told_that_a_prompt_is_too_long(server):
    long = [{"role": "user", "content": "def f(x):" * 3000}]
    body = {"messages": long, "max_tokens": 2, "stream": True}
    status, reply = server.ask("/v1/messages", body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert reply["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize("marked", [True, False])
def test_a_mark_is_a_place_to_continue_from(server, marked):
    """Another conversation behind the same marked system prompt reads its own tokens alone."""
    system = [{"type": "text", "text": f"You are {marked}." + " Read the long file." * 20}]
    if marked:
        system[0]["cache_control"] = {"type": "ephemeral"}
    cached = []
    for text in ("What is a list?", "Sort the words."):
        body = {"system": system, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        status, reply = server.ask("/v1/messages", body)
        assert status == 200
        usage = reply["usage"]
        cached.append(usage["cache_read_input_tokens"])
    assert cached[0] == 0
    if marked:
        assert cached[1] > 50
        assert usage["input_tokens"] < 20
    else:
        assert cached[1] == 0


def test_tokens_are_counted_as_they_are_read(server):
    body = claude_code(1, "read the file")
    status, counted = server.ask("/v1/messages/count_tokens", body)
    assert status == 200
    del body["max_tokens"]
    plain = json.loads(json.dumps(body).replace(', "cache_control": {"type": "ephemeral"}', ""))
    assert server.ask("/v1/messages/count_tokens", plain) == (200, counted)
    events = server.stream("/v1/messages", claude_code(9, "read the file"))
    usage = events[-2][1]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
