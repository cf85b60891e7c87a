"""The files of the page at ``/``, and the headers that bind what the page may do."""

from __future__ import annotations

import math
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from mlx_moeflux.generation.sampling_fields import REQUEST_FIELDS, SamplingField

PAGE = Path(__file__).parent / "page"

# Scripts and styles come from this server alone, and nothing is sent elsewhere. Text of a model
# that got past the sanitiser could not run: there are no inline scripts, and Trusted Types refuse
# strings where a browser would parse HTML.
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types dompurify",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # A new version of the server has new files under the same names.
    "Cache-Control": "no-cache",
}


INDEX = "index.html"


def index_text() -> str:
    """Return the page, with an input for each field of sampling that requests have."""
    inputs = [_input(name, field) for name, field in REQUEST_FIELDS.items()]
    text = (PAGE / INDEX).read_text("utf-8")
    return text.replace("<!-- sampling -->", f"\n{' ' * 6}".join(inputs))


def _input(name: str, field: SamplingField) -> str:
    low, high = field.requested
    given = {"name": name, "type": "number"}
    given |= {key: f"{bound:g}" for key, bound in (("min", low), ("max", high)) if bound < math.inf}
    given["step"] = "1" if field.kind is int else "any"
    if not field.serve:  # else the server's own value
        given["placeholder"] = field.placeholder or f"{field.off:g}"
    attributes = " ".join(f'{key}="{value}"' for key, value in given.items())
    return f"<label>{field.label}<input {attributes}></label>"


class PageFiles(StaticFiles):
    """Serves the page's files with :data:`HEADERS`."""

    def __init__(self):
        super().__init__(directory=PAGE)
        self._index = index_text()

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        if path == INDEX:
            response = Response(self._index, media_type="text/html")
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[Route | Mount]:
    """Return the routes of ``/`` and of the files that it names, under ``/page``."""
    files = PageFiles()

    async def index(request: Request) -> Response:
        return await files.get_response(INDEX, request.scope)

    return [Route("/", index, methods=["GET"]), Mount("/page", files)]


def is_page(path: str) -> bool:
    """Return True for what a browser loads before a user can enter the API key."""
    return path == "/" or path.startswith("/page/")
