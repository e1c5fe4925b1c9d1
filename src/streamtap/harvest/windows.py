"""Documents to windows of tokens that know where they come from; long ones are cut, and nothing of them is lost.

::

    document 0: a b c d e    document 1: f g        context 4, BOS = #
    windows          #abc  #de  #fg                 a window never crosses documents
    windows, packed  #abc  #def  #g                 full ones; ``starts`` says where in a window each document begins
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import EmptyPrompt, InvalidInput, InvalidPrompt
from streamtap.harvest.plan import Tokenised
from streamtap.harvested.segments import Segments
from streamtap.spec import CaptureSpec, Prompt, PromptLike

TokenIds = NDArray[np.int32]
_PROBE = "a"
# Documents that are tokenised in one go, and characters, for some are books.
_MOST_DOCUMENTS, _MOST_CHARACTERS = 512, 1 << 22


@dataclass(frozen=True)
class Document:
    """One document of a corpus.

    ``number`` is its row in the input, and ``place`` what to call it in errors; ``content`` None, or empty, is an
    empty row, which has no token.
    """

    number: int
    content: PromptLike | None
    place: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return self.content is None or (isinstance(self.content, Sized) and not len(self.content))


@dataclass(frozen=True, eq=False)
class _Body:
    """A document's own tokens, and whether windows of it begin as the tokenizer begins a text."""

    number: int
    token_ids: TokenIds
    is_led: bool


@dataclass
class _Open:
    """A window that is being filled: token ids in parts, and of each part its document and offset."""

    lead: TokenIds
    parts: list[TokenIds] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    n_tokens: int = 0

    def __post_init__(self) -> None:
        self.n_tokens = len(self.lead)

    def add(self, body: _Body, start: int, stop: int) -> None:
        self.parts.append(body.token_ids[start:stop])
        self.documents.append(body.number)
        self.offsets.append(start)
        self.n_tokens += stop - start

    def closed(self) -> Tokenised:
        lengths = [len(part) for part in self.parts]
        starts = np.cumsum([len(self.lead), *lengths[:-1]]).astype(np.int32)
        found = Segments(np.array(self.documents, np.int64), np.array(self.offsets, np.int64), starts)
        return Tokenised(np.concatenate([self.lead, *self.parts]).astype(np.int32), 0, found)


def windows(
    documents: Iterable[Document | PromptLike],
    tokenizer: PromptTokenizer,
    *,
    context: int,
    pack: bool = False,
    max_tokens: int | None = None,
    add_special_tokens: bool = True,
) -> Iterator[Tokenised]:
    """Cut documents into windows of at most ``context`` tokens, in order; each says which documents it is made of.

    Every window begins as the tokenizer begins a text (BOS, for most that have one), which belongs to no document, and
    what it puts at a text's end stands at the document's end. A document whose own tokens begin with BOS gets no second
    one, so none stands within a packed window. Token ids and chats that do not begin so are left without; in a packed
    window it is the window that begins so. A document that fits gives exactly the tokens of a prompt.

    Args:
        documents: In order; an empty one gives no window, and keeps its number.
        tokenizer: Of the model.
        context: Tokens in a window, what the tokenizer adds counted.
        pack: Fill each window with the next document where one ends, so that all but the last are full.
        max_tokens: Stop before the window that would make it more, over all windows.
        add_special_tokens: Off, nothing is added anywhere.

    Raises:
        InvalidInput: a ``context`` that the model does not have or that holds nothing, or ``max_tokens`` that no
            window fits in.
        InvalidPrompt: a document that cannot be run, named by its number.
    """
    lead, trail = _added(tokenizer) if add_special_tokens else (_ids(()), _ids(()))
    check_context(context, tokenizer)
    if context <= len(lead):
        raise InvalidInput(f"context must be more than the {len(lead)} tokens that begin each window; got {context}.")
    bodies = _bodies(documents, tokenizer, lead, trail)
    found = _packed(bodies, lead, context) if pack else _apart(bodies, lead, context)
    return found if max_tokens is None else bounded(found, max_tokens)


def check_context(context: int, tokenizer: PromptTokenizer) -> None:
    """Hold ``context`` against the model's own.

    Raises:
        InvalidInput: it is no number of tokens, or more than the model's.
    """
    most = tokenizer.context_length
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise InvalidInput(f"context must be a whole number of tokens, at least 1; got {context!r}.")
    if most is not None and context > most:
        raise InvalidInput(f"context must be at most the model's, {most} tokens; got {context}.")


def bounded(prompts: Iterable[Tokenised], max_tokens: int) -> Iterator[Tokenised]:
    """Those of the first prompts that come to at most ``max_tokens``; none is cut.

    Raises:
        InvalidInput: there is not room for one.
    """
    left, is_first = max_tokens, True
    for each in prompts:
        left -= len(each.token_ids)
        if left < 0 and is_first:
            raise InvalidInput(f"the first has {len(each.token_ids)} tokens, more than max_tokens={max_tokens}.")
        if left < 0:
            return
        is_first = False
        yield each


def _apart(bodies: Iterable[_Body], lead: TokenIds, context: int) -> Iterator[Tokenised]:
    for body in bodies:
        before = lead if body.is_led else lead[:0]
        step = context - len(before)
        for start in range(0, len(body.token_ids), step):
            window = _Open(before)
            window.add(body, start, min(start + step, len(body.token_ids)))
            yield window.closed()


def _packed(bodies: Iterable[_Body], lead: TokenIds, context: int) -> Iterator[Tokenised]:
    window = _Open(lead)
    for body in bodies:
        start = 0
        while start < len(body.token_ids):
            stop = min(start + context - window.n_tokens, len(body.token_ids))
            window.add(body, start, stop)
            start = stop
            if window.n_tokens == context:
                yield window.closed()
                window = _Open(lead)
    if window.parts:
        yield window.closed()


def _bodies(
    documents: Iterable[Document | PromptLike], tokenizer: PromptTokenizer, lead: TokenIds, trail: TokenIds
) -> Iterator[_Body]:
    whole = PromptTokenizer(
        tokenizer.tokenizer, vocabulary=tokenizer.vocabulary, special_ids=[int(each) for each in tokenizer.special_ids]
    )
    for batch in _batches(documents):
        for each, prompt, token_ids in _tokenised(batch, whole):
            yield _body(each.number, prompt, token_ids, lead, trail)


def _tokenised(batch: Sequence[Document], whole: PromptTokenizer) -> Iterator[tuple[Document, Prompt, TokenIds]]:
    read = [Prompt.of(each.content, each.number) for each in batch if each.content is not None]
    try:
        found = whole.encode(read, CaptureSpec(), batch[0].number, special_tokens=False)
    except InvalidPrompt as error:
        if len(batch) > 1:
            # One by one, so that an error has the right number.
            for each in batch:
                yield from _tokenised([each], whole)
        elif not isinstance(error, EmptyPrompt):  # of some texts a tokenizer leaves nothing
            raise
        return
    for each, prompt, tokens in zip(batch, read, found, strict=True):
        yield each, prompt, tokens.token_ids


def _body(number: int, prompt: Prompt, token_ids: TokenIds, lead: TokenIds, trail: TokenIds) -> _Body:
    begins = bool(len(lead)) and np.array_equal(token_ids[: len(lead)], lead)
    own = token_ids[len(lead) :] if begins else token_ids
    is_text = prompt.text is not None
    return _Body(number, np.concatenate([own, trail]) if is_text else own, is_text or begins)


def _batches(documents: Iterable[Document | PromptLike]) -> Iterator[list[Document]]:
    """Several documents, of those that are not empty."""
    batch: list[Document] = []
    characters = 0
    for row, each in enumerate(documents):
        document = each if isinstance(each, Document) else Document(row, each)
        if document.is_empty:
            continue
        batch.append(document)
        characters += _length(document.content)
        if len(batch) == _MOST_DOCUMENTS or characters > _MOST_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _length(content: Any) -> int:
    held = content
    if isinstance(content, Prompt):
        held = content.text if content.text is not None else content.token_ids
    return len(held) if isinstance(held, Sized) else 0


def _added(tokenizer: PromptTokenizer) -> tuple[TokenIds, TokenIds]:
    """What the tokenizer puts before and behind a text."""
    if tokenizer.tokenizer is None:
        return _ids(()), _ids(())
    bare, dressed = (tokenizer.read(_PROBE, 0, special_tokens=special) for special in (False, True))
    for start in range(len(dressed) - len(bare) + 1):
        stop = start + len(bare)
        if np.array_equal(dressed[start:stop], bare):
            return dressed[:start], dressed[stop:]
    raise InvalidInput(
        "the tokenizer changes a text's own tokens when it adds special ones, so windows cannot be cut; pass "
        "add_special_tokens=False."
    )


def _ids(values: Sequence[int]) -> TokenIds:
    return np.array(values, np.int32)
