"""The error of a request that is not served."""

from __future__ import annotations

from mlx_moeflux.errors import MoefluxError

CONTEXT_EXCEEDED = "context_length_exceeded"
MEMORY_EXCEEDED = "memory_exceeded"


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
