"""Log-probabilities as OpenAI's completions and vLLM write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamtap.completion import TokenLog

#: What JSON has for the logarithm of 0; vLLM's choice.
LEAST_LOGPROB = -9999.0


def logprobs_object(logs: Sequence[TokenLog]) -> dict[str, list[Any]]:
    """OpenAI's four lists, one entry a token; where nothing stood before a token, its logprob and rivals are null."""
    return {
        "tokens": [log.text for log in logs],
        "token_logprobs": [_finite(log.logprob) for log in logs],
        "top_logprobs": [_rivals(log) for log in logs],
        "text_offset": [log.offset for log in logs],
    }


def read_logprobs(body: Mapping[str, Any]) -> tuple[TokenLog, ...]:
    """The logs that OpenAI's four lists say; ids are not among them and are -1."""
    tokens = body.get("tokens") or []
    logprobs, offsets = body.get("token_logprobs") or [], body.get("text_offset") or [0] * len(tokens)
    tops = body.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLog(-1, text, offset, logprob, top=tuple((-1, rival, value) for rival, value in (top or {}).items()))
        for text, logprob, top, offset in zip(tokens, logprobs, tops, offsets, strict=True)
    )


def prompt_entry(log: TokenLog) -> dict[str, dict[str, Any]] | None:
    """One entry of ``prompt_logprobs``: the token itself first, whatever its rank, then the likeliest by rank."""
    if log.logprob is None:
        return None
    own = {"logprob": _finite(log.logprob), "rank": log.rank, "decoded_token": log.text}
    entry: dict[str, dict[str, Any]] = {str(log.token_id): own}
    for rank, (token_id, text, logprob) in enumerate(log.top, 1):
        if token_id != log.token_id:
            entry[str(token_id)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
    return entry


class ReadPromptLogs:
    """A prompt's log-probabilities as an answer says them."""

    def __init__(self, entries: Sequence[Mapping[str, Mapping[str, Any]] | None]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        """Prompt tokens."""
        return len(self._entries)

    def at(self, position: int) -> TokenLog:
        """The token at ``position`` and its likeliest rivals; where the answer says nothing its id is -1."""
        entry = self._entries[position]
        if not entry:
            return TokenLog(-1, "", 0, None)
        own, said = next(iter(entry.items()))
        ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])
        top = tuple((int(token), str(each["decoded_token"]), each["logprob"]) for token, each in ranked)
        return TokenLog(int(own), str(said["decoded_token"]), 0, said["logprob"], said["rank"], top)


def _rivals(log: TokenLog) -> dict[str, float | None] | None:
    """Texts and logprobs, best first, the token itself always; of two ids with one text the likelier stays."""
    if log.logprob is None:
        return None
    rivals: dict[str, float | None] = {}
    for _, text, logprob in log.top:
        rivals.setdefault(text, _finite(logprob))
    rivals.setdefault(log.text, _finite(log.logprob))
    return rivals


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
