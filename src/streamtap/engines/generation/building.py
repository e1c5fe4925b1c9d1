"""Put a generator together for a loaded model."""

from __future__ import annotations

import threading
from typing import Any

from streamtap.capture.forward import Forward
from streamtap.capture.head import Head
from streamtap.capture.passes import passes_for
from streamtap.engines.generation.admission import Admission
from streamtap.engines.generation.generator import Generator
from streamtap.engines.generation.step import Stepper
from streamtap.engines.tokenizing import PromptTokenizer


def generator_for(
    forward: Forward, head: Head, tokenizer: PromptTokenizer, *, max_step_tokens: int, device_lock: threading.Lock
) -> Generator:
    """A generator over ``forward``'s model; a trial shows which way it can run many sequences."""
    blocks = forward.blocks
    with device_lock:
        passes = passes_for(forward)
    admission = Admission(
        tokenizer,
        n_layers=blocks.n_layers,
        hidden=blocks.hidden,
        vocabulary=head.vocabulary,
        end_ids=end_ids_of(forward.model, tokenizer.tokenizer),
        device=forward.device,
    )
    stepper = Stepper(passes, head, blocks.hidden, blocks.n_layers, forward.device)
    return Generator(admission, stepper, max_step_tokens=max_step_tokens, device_lock=device_lock)


def end_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that end a text: from the checkpoint's generation config, else its config or tokenizer."""
    sources = (
        getattr(model, "generation_config", None),
        model.config.get_text_config(decoder=True),
        tokenizer,
    )
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()
