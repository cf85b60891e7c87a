"""The error of a request that is not served."""

from __future__ import annotations

from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.experts.budget import format_bytes

CONTEXT_EXCEEDED = "context_length_exceeded"
BODY_EXCEEDED = "request_too_large"

# Agents shorten a conversation when an error says this, and read the two numbers behind it: they
# must stand at the beginning, without other digits before them.
TOO_LONG = "prompt is too long"


class RequestError(MoefluxError, ValueError):
    """A request is not served; a protocol turns this into its own error object.

    status: HTTP status. param: The field at fault, dotted. code: OpenAI's short name of the fault.
    retry_after: Seconds after which the client may try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(" ".join(message.split()))
        self.status, self.param, self.code = status, param, code
        self.retry_after = retry_after


class PromptTooLong(RequestError):
    """A prompt has more tokens than one may have, by the context or by memory.

    tokens: Of the prompt. most: Tokens that a prompt may have. memory: Bytes of all states if these
    are the limit, None if it is the context. estimated: `tokens` was not counted to the end.
    """

    def __init__(
        self, tokens: int, most: int, *, memory: int | None = None, estimated: bool = False
    ):
        counted = f"{TOO_LONG}: {tokens} tokens > {most} maximum"
        if estimated:
            counted += " (the first is an estimate)"
        why = f"This model's maximum context length is {most} tokens"
        mend = "reduce the length of the messages, or raise --max-context where the model allows it"
        if memory is not None:
            why += f" in the {format_bytes(memory)} for states"
            mend = "reduce the length of the messages, or raise --kv-memory"
        super().__init__(f"{counted}. {why}; {mend}.", code=CONTEXT_EXCEEDED)
        self.tokens = tokens


def body_too_large(what: str) -> RequestError:
    """Return the error of a body that is larger than any prompt may be. what: By which measure."""
    text = f"{TOO_LONG}: {what}; reduce the length of the messages."
    return RequestError(text, status=413, code=BODY_EXCEEDED)
