"""POST /v1/chat/completions, which is refused."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from streamtap.errors import ChatUnsupported


async def refuse_chat(request: Request) -> Response:
    """Say why there are no chat completions."""
    raise ChatUnsupported(
        "chat completions are not served: a template that the server applies would leave positions undefined. Apply "
        "the model's template yourself and POST the text to /v1/completions with add_special_tokens false."
    )
