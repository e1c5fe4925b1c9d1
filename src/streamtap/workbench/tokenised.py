"""What the cache remembers of how prompts became tokens, under whichever rule that was."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamtap.cache import CacheStore
from streamtap.errors import InvalidInput
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.known_model import KnownModel
from streamtap.workbench.prompt_keys import PromptKeys
from streamtap.workbench.tokenizing_rules import RULES

_SHOWN = 8


@dataclass(frozen=True)
class Tokenised:
    """Digests of prompts, and the numbers in ``RULES`` of how they came to be.

    ``digests`` and ``rules`` are one a prompt, None and 0 for those that were never seen; ``others`` are the digests
    and rules of those that became different tokens under different rules, by the prompt's place.
    """

    digests: list[bytes | None]
    rules: list[int]
    others: Mapping[int, Sequence[tuple[bytes, int]]]

    def every(self) -> list[bytes]:
        """Every digest."""
        more = [digest for pairs in self.others.values() for digest, _ in pairs]
        return [digest for digest in self.digests if digest is not None] + more

    def choose(self, held: Container[bytes]) -> tuple[list[bytes | None], list[int]]:
        """One digest a prompt and its rule: one of which there are rows, where there are some.

        Args:
            held: The digests of which there are rows.

        Raises:
            InvalidInput: there are rows of several; the prompts are named, and what picks one.
        """
        digests, rules = list(self.digests), list(self.rules)
        unclear: dict[int, set[str]] = {}
        for place, pairs in self.others.items():
            here = [(digest, rule) for digest, rule in pairs if digest in held]
            if len(here) > 1:
                unclear[place] = _differences([rule for _, rule in here])
            elif here and digests[place] not in held:
                digests[place], rules[place] = here[0]
        if unclear:
            names = sorted(set.union(*unclear.values()))
            shown = ", ".join(map(str, sorted(unclear)[:_SHOWN])) + (", …" if len(unclear) > _SHOWN else "")
            raise InvalidInput(
                f"{len(unclear)} prompts were made into tokens in several ways, and there are rows of each (prompts "
                f"{shown}). Pick one with {' or '.join(f'{name}=' for name in names)}."
            )
        return digests, rules


def find_tokenised(
    store: CacheStore, source: KnownModel, spec: CaptureSpec, prompts: Sequence[Prompt], picks: Mapping[str, Any]
) -> Tokenised:
    """What is remembered of ``prompts``; ``generation_prompt`` and ``truncate`` in ``picks`` leave some out.

    A text does not depend on how a chat is opened, and what was never cut serves any cut.
    """
    digests: list[bytes | None] = [None] * len(prompts)
    rules, others = [0] * len(prompts), dict[int, list[tuple[bytes, int]]]()
    for number, rule in enumerate(RULES):
        if rule["truncate"] not in (None, picks.get("truncate") or rule["truncate"]):
            continue
        wrongly_opened = picks.get("generation_prompt") not in (None, rule["generation_prompt"])
        for place, digest in enumerate(PromptKeys(store, source, replace(spec, **rule)).seen(prompts)):
            if digest is None or (wrongly_opened and prompts[place].messages is not None):
                continue
            first = digests[place]
            if first is None:
                digests[place], rules[place] = digest, number
            elif digest not in (first, *(other for other, _ in others.get(place, ()))):
                others.setdefault(place, [(first, rules[place])]).append((digest, number))
    return Tokenised(digests, rules, others)


def _differences(rules: Sequence[int]) -> set[str]:
    chosen = [RULES[rule] for rule in rules]
    return {name for name in chosen[0] if len({each[name] for each in chosen}) > 1}
