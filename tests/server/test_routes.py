"""Oracle: HTTP (RFC 9110) and the Fetch standard: methods, redirects, encodings, preflights."""

from __future__ import annotations

import gzip
import http.client
import json

import pytest

from tests.server.conftest import MESSAGES, served, with_limits

CHAT = "/v1/chat/completions"
BODY = {"messages": MESSAGES, "max_tokens": 1}
ORIGIN = "app://obsidian.md"
PROXIED = {"Origin": "https://ai.example.org"}


@pytest.fixture(scope="module")
def open_to_a_page(tiny):
    with served(*tiny, limits=with_limits(origins=frozenset({ORIGIN}))) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PATCH", "/v1/messages", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/models/a", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/page/app.js", "GET, HEAD"),
        ("OPTIONS", "/", "GET, HEAD"),
    ],
)
def test_a_refused_method_names_the_allowed_ones(server, method, path, allowed):
    assert server.ask(path, method=method)[0] == 405
    assert server.headers["Allow"] == allowed


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/?limit=20", "/v1/models?limit=20"])
def test_a_slash_behind_the_models_changes_nothing(server, path):
    assert server.ask(path) == server.ask("/v1/models")


@pytest.mark.parametrize(
    ("path", "location"),
    [
        (f"{CHAT}/", CHAT),
        ("/v1/messages/?beta=true", "/v1/messages?beta=true"),
        ("/v1/responses//", "/v1/responses"),
        ("/tokenize/?a=%2F&b", "/tokenize?a=%2F&b"),
    ],
)
def test_other_slashes_are_redirected_whatever_the_server_is_called(server, path, location):
    assert server.ask(path, BODY, headers={"Host": "localhost:1"})[0] == 307
    assert server.headers["Location"] == location


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/v1/", "/page", "/v1/nothing/", "/v1/messages%3F/"]
)
def test_no_other_path_is_redirected(server, path):
    assert server.ask(path)[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/chat/completions"), ("POST", "/v1/embeddings"), ("GET", "/models"),
     ("GET", "/version"), ("GET", "/api/tags"), ("PUT", "/v1/messages/batches")],
)  # fmt: skip
def test_another_path_is_told_those_that_there_are(server, method, path):
    status, reply = server.ask(path, {} if method == "POST" else None, method=method)
    assert status == 404
    assert reply["error"]["message"] == (
        f"{method} {path}: Not Found; under /v1 there are /v1/chat/completions, /v1/completions, "
        "/v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/models."
    )
    for there in reply["error"]["message"].rstrip(".").split("there are ")[1].split(", "):
        assert server.ask(there, method="GET")[0] != 404


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/health", "/v1/models", "/props"])
def test_head_has_the_headers_of_get_and_no_body(server, path):
    server.ask(path)
    told = [server.headers[name] for name in ("Content-Type", "Content-Length")]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(2):  # a body would be read as the next answer
        connection.request("HEAD", path)
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        assert [response.headers[name] for name in ("Content-Type", "Content-Length")] == told
    connection.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, identity"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_compressed_body_is_refused_in_words(server, path, encoding):
    body = gzip.compress(json.dumps(BODY).encode())
    status, reply = server.ask(path, body, headers={"Content-Encoding": encoding})
    assert status == 415
    message = f"the body is encoded with '{encoding.lower()}'; send it uncompressed."
    assert reply["error"]["message"] == message


def test_an_encoding_that_changes_nothing_is_none(server):
    assert server.ask(CHAT, BODY, headers={"Content-Encoding": "Identity"})[0] == 200
    assert server.ask("/v1/models", headers={"Content-Encoding": "gzip"})[0] == 200


def preflight(server, headers, origin=ORIGIN):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": headers}
    status, _ = server.ask(CHAT, headers=asked, method="OPTIONS")
    return status, server.headers["Access-Control-Allow-Headers"]


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        ("content-type,x-stainless-os,x-stainless-lang", None),
        ("anthropic-version, anthropic-beta, anthropic-dangerous-direct-browser-access", None),
        ("authorization,openai-organization,openai-project", None),
        ("", ""),
        ("a b, x-api-key, é, (c), ,", "x-api-key"),
        (f"{'a' * 101}, b", "b"),
        (",".join(f"x-{i}" for i in range(1000)), ", ".join(f"x-{i}" for i in range(64))),
    ],
)
def test_a_page_may_send_the_headers_that_it_asks_for(open_to_a_page, asked, granted):
    if granted is None:
        granted = ", ".join(name.strip() for name in asked.split(","))
    assert preflight(open_to_a_page, asked.encode("latin-1")) == (204, granted)
    headers = open_to_a_page.headers
    assert headers["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS"
    assert headers["Access-Control-Max-Age"] == "7200"
    assert headers["Vary"] == "origin, access-control-request-headers"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "app://obsidian.md.evil"])
def test_other_pages_are_granted_nothing(open_to_a_page, origin):
    assert preflight(open_to_a_page, "x-api-key", origin) == (403, None)


def test_replies_carry_no_headers_of_preflights(open_to_a_page):
    assert open_to_a_page.ask("/v1/models", headers={"Origin": ORIGIN})[0] == 200
    assert open_to_a_page.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert open_to_a_page.headers["Vary"] == "origin"
    assert open_to_a_page.headers["Access-Control-Max-Age"] is None


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css"])
def test_the_files_of_the_page_are_everybodys(server, path):
    """A proxy may send its own Host, and a browser the Origin that it knows."""
    assert server.ask(path, headers=PROXIED)[0] == 200
    assert server.ask(path, headers={**PROXIED, "Host": "evil.example"})[0] == 403


@pytest.mark.parametrize("path", ["/props", "/metrics", "/v1/models", "/pages", "/page"])
def test_a_page_behind_a_proxy_reads_what_to_set(server, path):
    status, reply = server.ask(path, headers=PROXIED)
    assert (status, "--allowed-origins" in reply["error"]["message"]) == (403, True)
    assert "https://ai.example.org" in reply["error"]["message"]
    status, reply = server.ask(path, headers={"Host": "ai.example.org"})
    assert (status, "--allowed-host " in reply["error"]["message"]) == (403, True)


def test_a_browser_at_a_wrong_name_reads_a_sentence(server):
    headers = {"Host": "<b>.example", "Accept": "text/html,application/xhtml+xml;q=0.9"}
    status, text = server.ask("/", headers=headers)
    assert (status, server.headers.get_content_type()) == (403, "text/plain")
    assert text.startswith("this server is not called '<b>.example'; start it with --allowed-host")
    assert server.ask("/", headers={"Host": "a.example"})[1]["error"]["code"] == "host_not_allowed"
