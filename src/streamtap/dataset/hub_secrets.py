"""Tokens of the Hub: what may be sent, and how to keep it out of everything that is shown."""

from __future__ import annotations

import re

from streamtap.errors import AccessDenied, InvalidInput, StreamtapError

_HOLDS_WHAT_NO_TOKEN_HOLDS = (
    "holds spaces, line breaks or other characters that no token has (it is not shown here); "
    "copy it again from https://huggingface.co/settings/tokens, alone."
)
_LEGAL = re.compile(r"[!-~]+")
_SECRETS = re.compile(r"\bhf_\w+|(?<=Bearer )\S+|(?<=\?)\S+|(?<=//)[^/\s@]*@", re.IGNORECASE)
_LONGEST_QUOTE = 300


class Token(str):
    """A token, which its representation does not show: tracebacks with local variables are common."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Token(not shown)"


def checked_token(token: str | bool | None) -> Token | bool | None:
    """A token without the white space around it; an empty one is none at all.

    Raises:
        InvalidInput: characters that no token has.
    """
    if not isinstance(token, str):
        return token
    token = Token(token.strip())
    if token and not _LEGAL.fullmatch(token):
        raise InvalidInput(f"the token {_HOLDS_WHAT_NO_TOKEN_HOLDS}")
    return token or None


def token_that_is_sent(token: Token | bool | None) -> Token | None:
    """The token that the client would send: the one given, else the one in ``HF_TOKEN`` or of ``hf auth login``.

    Raises:
        InvalidInput: it holds characters that no token has.
        AccessDenied: ``token=True``, and there is none.
    """
    from huggingface_hub.errors import LocalTokenNotFoundError
    from huggingface_hub.utils import build_hf_headers

    failure: StreamtapError
    try:
        found = Token(build_hf_headers(token=token).get("authorization", "").removeprefix("Bearer "))
    except LocalTokenNotFoundError:
        failure = AccessDenied(
            "token=True means a saved token, and there is none: run `hf auth login` or set HF_TOKEN."
        )
    except UnicodeError:
        failure = InvalidInput(f"the token that `hf auth login` saved {_HOLDS_WHAT_NO_TOKEN_HOLDS}")
    else:
        if not found or _LEGAL.fullmatch(found):
            return found or None
        failure = InvalidInput(f"the token in HF_TOKEN, or that `hf auth login` saved, {_HOLDS_WHAT_NO_TOKEN_HOLDS}")
    # Not in the handler: what was caught there may hold the token, and would come along as its context.
    raise failure


def quoted(text: str, token: Token | None) -> str:
    """A server's or a library's words in one line, without tokens, signatures in addresses, and passwords."""
    if token:
        text = text.replace(token, "***")
    text = " ".join(_SECRETS.sub("***", text).split())
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "…"
