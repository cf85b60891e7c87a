"""From a request to its replies: renders the prompt, submits it, and assembles what comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import CacheError, InputError
from mlx_moeflux.generation.prompt import prompt_ids, turn_end
from mlx_moeflux.generation.text import end_ids
from mlx_moeflux.models.protocol import LoadedModel
from mlx_moeflux.sandbox.requests import TemplateNames, template_names
from mlx_moeflux.server.assemble import Assembler, Delta
from mlx_moeflux.server.calls.reader import whole_calls
from mlx_moeflux.server.calls.registry import choose_syntax
from mlx_moeflux.server.calls.splitter import CallSearch, ToolSplitter
from mlx_moeflux.server.calls.syntax import calls_grammar, parameters_of
from mlx_moeflux.server.constrain import Constraint, Grammars, token_bytes
from mlx_moeflux.server.engine import Engine, EngineOptions, Job, Token
from mlx_moeflux.server.errors import PromptTooLong, RequestError
from mlx_moeflux.server.memory import ServerMemory
from mlx_moeflux.server.messages import other_forms, with_reasoning, without_empty_texts
from mlx_moeflux.server.metrics import Metrics
from mlx_moeflux.server.reasoning import choose_reasoning
from mlx_moeflux.server.request import AUTO, NONE, REQUIRED, Defaults, GenerationRequest
from mlx_moeflux.server.thinking import reasoning_field, template_variables


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a server.

    name: Of the model, in replies.
    strict_model: Refuse requests for other names.
    seconds: Longest time of one request.
    template_options: Variables of the chat template, below the request's own.
    tool_parser, reasoning_parser: Names of syntaxes; None chooses by template and vocabulary.
    """

    name: str
    defaults: Defaults
    strict_model: bool = False
    seconds: float = 3600.0
    template_options: dict[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. opened: It ends inside the reasoning. breakpoints: See :class:`Job`."""

    ids: list[int]
    opened: bool = False
    breakpoints: Sequence[int] = ()


class Service:
    """One model, its engine, and how its replies are read; lives as long as the server. memory: The
    plan, to show it."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Any,
        options: ServiceOptions,
        engine_options: EngineOptions,
        prompt_cache: PromptCache | None = None,
        memory: ServerMemory | None = None,
    ):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.memory = memory
        self.vocabulary: int = model.config.vocab_size
        self.created = int(time.time())
        self.prompt_cache = prompt_cache
        self.metrics = Metrics()
        self.engine = Engine(model, end_ids(tokenizer), engine_options, prompt_cache)
        templates = (tokenizer.chat_template, tokenizer.tool_template)
        self.tool_syntax = choose_syntax(templates, options.tool_parser)
        self.reasoning = choose_reasoning(tokenizer, options.reasoning_parser)
        visible = self.tool_syntax.visible if self.tool_syntax else ()
        self.grammars = Grammars(tokenizer, self.vocabulary, visible)
        names = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self.special = {i: name for i, name in names if name}
        self.draining = False
        # Two requests render and encode at a time: more would take the engine's processor time.
        self.rendering = asyncio.Semaphore(2)

    @property
    def ready(self) -> bool:
        return self.engine.alive and self.engine.warm and not self.draining

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name if the server is strict."""
        if self.options.strict_model and name not in (None, self.options.name):
            raise RequestError(
                f"the model '{name[:80]}' is not served; there is '{self.options.name}'.",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def start(self, request: GenerationRequest) -> Generation:
        """Render and submit a request.

        Raises:
            RequestError: It cannot be served, now or ever.
        """
        if self.draining:
            raise RequestError("the server is shutting down.", status=503, retry_after=10)
        engine = self.engine
        engine.check_room(request.n, expected=engine.expected)
        engine.expected += request.n
        try:
            async with self.rendering:
                prompt, grammar = await asyncio.to_thread(self._prepare, request)
            return Generation(self, request, prompt, grammar)
        finally:
            engine.expected -= request.n

    def _prepare(self, request: GenerationRequest) -> tuple[Prompt, str | None]:
        prompt = self.render(request)
        if (too_long := self.engine.too_long(len(prompt.ids))) is not None:
            raise too_long
        return prompt, self._grammar(request)

    def count(self, request: GenerationRequest) -> int:
        """Return the tokens of the prompt of a request, also of one that is too long to be read; of
        one much longer than the context, an estimate."""
        try:
            return len(self.render(request).ids)
        except PromptTooLong as error:
            return error.tokens

    def limit(self, request: GenerationRequest) -> int:
        """Return the most tokens of a reply that the request allows, or UNLIMITED."""
        return request.max_tokens or self.options.defaults.max_tokens

    def render(self, request: GenerationRequest) -> Prompt:
        """Return the prompt of a request.

        Raises:
            RequestError: The template refuses the messages, or they have no tokens.
            PromptTooLong: They are much longer than the context.
        """
        if not request.answer:
            return Prompt(self.encode(request.prompt))
        given = self._template_arguments(request)
        field = reasoning_field(self._names(given["tools"]))
        messages = without_empty_texts(request.messages, self._template(given["tools"]))
        messages = with_reasoning(messages, field)
        options = {**given["options"], "continue_final_message": request.continued}
        messages, ids = self._rendered(messages, field, {**given, "options": options})
        turn = messages[:-1] if request.continued else messages
        ends = {turn_end(self.tokenizer, turn, ids, **given)}
        for count in request.checkpoints:
            ends.add(turn_end(self.tokenizer, messages[:count], ids, **given))
        opened = self._opened(ids, messages[-1]["content"] if request.continued else "")
        return Prompt(ids, opened, sorted(end for end in ends if end))

    def _opened(self, ids: list[int], begun: str) -> bool:
        """Return True if a prompt ends inside the reasoning. begun: What the assistant has said."""
        if self.reasoning is None:
            return False
        if begun.rfind(self.reasoning.open) > begun.rfind(self.reasoning.close):
            return True
        return self.tokenizer.decode(ids[-8:]).rstrip().endswith(self.reasoning.open)

    def _rendered(
        self, messages: list[dict[str, Any]], field: str, given: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Return messages in the first form that the template takes, and their ids."""
        try:
            return messages, self._ids(messages, "messages", given)
        except PromptTooLong:
            raise
        except RequestError:
            for changed in other_forms(messages, field):
                with contextlib.suppress(RequestError):
                    return changed, self._ids(changed, "messages", given)
            raise

    def encode(self, text: str | list[int] | None) -> list[int]:
        """Return the ids of a text, or ids as they are, checked against the vocabulary."""
        return self._ids(text, "prompt", {})

    def _ids(self, prompt: Any, param: str, given: dict[str, Any]) -> list[int]:
        try:
            return prompt_ids(self.model, self.tokenizer, prompt, **given)
        except CacheError as error:
            raise self.long_text(error) from error
        except InputError as error:
            raise RequestError(str(error), param=param) from error

    def long_text(self, error: CacheError) -> RequestError:
        """Return the refusal of a text that is much longer than the context."""
        too_long = self.engine.too_long(error.tokens, estimated=True)
        assert too_long is not None
        return too_long

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for."""
        return token_bytes(self.tokenizer, token)

    def _template_arguments(self, request: GenerationRequest) -> dict[str, Any]:
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template.",
                param="messages",
            )
        tools = request.tools if request.tool_choice != NONE else []
        if tools and self.tool_syntax is None:
            raise RequestError(
                "this model's chat template has no known syntax of tool calls; leave 'tools' out.",
                param="tools",
            )
        options = {**self.options.template_options, **self._thinking(request, tools)}
        return {"tools": tools or None, "options": {**options, **request.template_options}}

    def _thinking(self, request: GenerationRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the template's variables that make the model think as the request asks."""
        asked = request.thinking
        found = {} if asked is None else template_variables(asked, self._names(tools))
        if asked is not None and found is None and asked.field is not None:
            off = asked.on is False or asked.effort == "none"
            what = "switch that turns thinking off" if off else "switch for thinking"
            raise RequestError(
                f"this model's chat template has no {what}; leave '{asked.field}' out.",
                param=asked.field,
            )
        return found or {}

    def _names(self, tools: list[dict[str, Any]] | None) -> TemplateNames:
        """Return what the chat template of a request reads."""
        return template_names(self._template(tools))

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        own = self.tokenizer.tool_template if tools else None
        return own or self.tokenizer.chat_template

    def _grammar(self, request: GenerationRequest) -> str | None:
        """Return the compiled grammar that the replies must follow, or None."""
        grammar, choice = None, request.tool_choice
        answer = request.schema if choice in (AUTO, NONE) else ()
        for schema in answer:
            grammar = self.grammars.json_schema(schema)
            self.grammars.check(grammar, "response_format")
        if request.tools and choice != NONE and (answer or choice != AUTO):
            assert self.tool_syntax is not None
            tools = parameters_of(request.tools)
            if choice not in (AUTO, REQUIRED):
                tools = {choice: tools[choice]}
            many = request.parallel_tool_calls and choice in (AUTO, REQUIRED)
            text = calls_grammar(self.tool_syntax, tools, many=many, answer=answer)
            grammar = self.grammars.lark(text)
            self.grammars.check(grammar, "tools")
        return grammar


class Generation:
    """The replies to one request, while they come. Belongs to the event loop.

    prompt_tokens, cached_tokens: Of the prompt; cached ones came from the prompt cache. finished:
    How each reply ended, None before.
    """

    def __init__(
        self, service: Service, request: GenerationRequest, prompt: Prompt, grammar: str | None
    ):
        self._service, self.request = service, request
        self.prompt_tokens, self.cached_tokens = len(prompt.ids), 0
        self.finished: list[str | None] = [None] * request.n
        self.began, self.first_token = time.monotonic(), None
        self._assemblers = [self._assembler(prompt) for _ in range(request.n)]
        self._ready: list[tuple[int, Delta]] = []
        self._error: RequestError | None = None
        self._news = asyncio.Event()
        self._constraints = [self._constraint(prompt, grammar) for _ in range(request.n)]
        self._before = service.model.store.stats().total
        self._jobs = [self._job(prompt, i) for i in range(request.n)]
        service.engine.submit(self._jobs)
        self._timer = asyncio.get_running_loop().call_later(service.options.seconds, self._expire)

    @property
    def completion_tokens(self) -> int:
        return sum(assembler.tokens for assembler in self._assemblers)

    @property
    def reasoning_tokens(self) -> int:
        return sum(assembler.reasoning_tokens for assembler in self._assemblers)

    @property
    def done(self) -> bool:
        """Return True if there is nothing more to come."""
        return None not in self.finished and not self._ready

    async def parts(self) -> list[tuple[int, Delta]]:
        """Return what is new, at least one part, each with the number of its reply.

        Raises:
            RequestError: The replies failed.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        parts, self._ready = self._ready, []
        return parts

    async def whole(self) -> list[Delta]:
        """Wait for the replies; return each as one part, with its whole calls."""
        replies = [Delta() for _ in range(self.request.n)]
        while not self.done:
            for i, delta in await self.parts():
                reply = replies[i]
                reply.text += delta.text
                reply.reasoning += delta.reasoning
                reply.calls += delta.calls
                reply.logprobs += delta.logprobs
                reply.finish, reply.stop = delta.finish, delta.stop
        for reply in replies:
            reply.calls = whole_calls(reply.calls)
        return replies

    def prompt_progress(self) -> dict[str, int] | None:
        """Return how many tokens of the prompt are read, of them from the prompt cache, and the
        milliseconds since the request began; None once the reply has begun."""
        if self.first_token is not None:
            return None
        prompts = self._service.engine.workload.prompts
        read = [prompts[job.uid] for job in self._jobs if job.uid in prompts]
        cached, processed = min(read, default=(0, 0))
        return {
            "total": self.prompt_tokens,
            "cache": cached,
            "processed": processed,
            "time_ms": int(1000 * (time.monotonic() - self.began)),
        }

    def hit_rate(self) -> float:
        """Return the hit rate of the experts since the request began, of all replies together."""
        return self._service.model.store.stats().total.since(self._before).hit_rate

    def close(self) -> None:
        """Cancel what is still running; the places are free at the next step."""
        self._timer.cancel()
        self._service.engine.cancel(self._jobs)

    def _assembler(self, prompt: Prompt) -> Assembler:
        request, service = self.request, self._service
        reasoning = tools = calls = None
        syntax = service.tool_syntax
        if request.tools and request.tool_choice != NONE and syntax is not None:
            functions = parameters_of(request.tools)
            most = None if request.parallel_tool_calls else 1
            strays = () if service.reasoning is None else service.reasoning.strays
            tools = ToolSplitter(syntax, functions, most=most, strays=strays)
            calls = CallSearch(syntax, functions)
        if request.answer and service.reasoning is not None:
            reasoning = service.reasoning.splitter(opened=prompt.opened, calls=calls)
            if request.continued and not prompt.opened:
                reasoning.leave()
        special = service.special if request.answer else None
        return Assembler(
            service.tokenizer, stop=request.stop, reasoning=reasoning, tools=tools, special=special
        )

    def _constraint(self, prompt: Prompt, grammar: str | None) -> Constraint | None:
        if grammar is None:
            return None
        after = None
        if prompt.opened:
            assert self._service.reasoning is not None
            # The grammar holds for the answer, which begins behind this token.
            close = self._service.reasoning.close
            after = self._service.tokenizer.convert_tokens_to_ids(close)
        return self._service.grammars.constraint(grammar, len(prompt.ids), after)

    def _job(self, prompt: Prompt, i: int) -> Job:
        request, constraint = self.request, self._constraints[i]
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + i)
        return Job(
            prompt.ids,
            self._service.limit(request),
            sampling,
            lambda token: self._hear(i, token),
            logprobs=request.logprobs,
            processors=[] if constraint is None else [constraint],
            breakpoints=prompt.breakpoints,
        )

    def _hear(self, i: int, token: Token) -> None:
        """Take a token of reply `i` from the engine."""
        if token.error is not None:
            self._fail(token.error)
            return
        if self.first_token is None:
            self.first_token, self.cached_tokens = time.monotonic(), token.cached
        deltas = self._assemblers[i].add(token)
        finish = deltas[-1].finish if deltas else None
        constraint = self._constraints[i]
        if finish and constraint is not None and constraint.error:
            self._fail(RequestError("the grammar became too complex for this reply."))
            return
        if deltas:
            self._ready += [(i, delta) for delta in deltas]
            self._news.set()
        if finish:
            self.finished[i] = finish
            if token.finish is None:
                self._service.engine.cancel([self._jobs[i]])

    def _expire(self) -> None:
        seconds = self._service.options.seconds
        self._fail(RequestError(f"the request took longer than {seconds:g} s.", status=504))

    def _fail(self, error: RequestError) -> None:
        self._service.engine.cancel(self._jobs)
        self._error = error
        self._news.set()
