"""The one block of code that runs inside a trace, here or on a server.

nnsight sends its source and the values that it names. It must therefore name nothing of Streamtap, which no server has:
tensors, numbers, torch and nnsight alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nnsight
import torch


def run_trace(
    model: Any,
    blocks: Sequence[Any],
    dtype: torch.dtype,
    backend: Any,
    *,
    token_ids: torch.Tensor,
    batch: torch.Tensor,
    positions: torch.Tensor,
    counts: list[int],
    reduce: str | None,
    predicting: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor,
    top_k: int | None,
    slice_rows: int,
    needs_head: bool,
) -> Any:
    """Run one pass and give what is kept of it as a uint8 tensor [bytes]; see ``traces.read_trace``.

    ``model`` is nnsight's tree over the model, and ``blocks`` those of it that are read, ascending: the pass ends
    behind the last of them where no logits are looked at. ``dtype`` is that of the rows that come back, ``backend``
    what runs the trace, None in this process. ``traces.Trace`` tells of the rest.
    """
    packed = None
    with model.trace(input_ids=token_ids, use_cache=False, backend=backend) as tracer:
        parts = []
        for block in blocks:
            output = block.output
            stream = (output[0] if isinstance(output, (tuple, list)) else output).detach()
            rows = stream[batch.to(stream.device), positions.to(stream.device)]
            wide = torch.promote_types(rows.dtype, torch.float32)
            if reduce == "mean":
                rows = torch.stack([piece.to(wide).mean(dim=0) for piece in rows.split(counts)])
            elif reduce == "max":
                rows = torch.stack([piece.amax(dim=0) for piece in rows.split(counts)])
            parts.append(rows.to(dtype).cpu())
        if needs_head:
            logits = model.output.logits.detach()
            logits = logits.reshape(-1, logits.shape[-1])
            wide = torch.promote_types(logits.dtype, torch.float32)
            for start in range(0, len(predicting), slice_rows):
                part = logits[predicting[start : start + slice_rows].to(logits.device)].to(wide)
                nexts = targets[start : start + slice_rows].to(logits.device)
                costs = torch.logsumexp(part, dim=-1) - part.gather(1, nexts[:, None])[:, 0]
                parts.append(costs.to(torch.float32).cpu())
            best = []
            for start in range(0, len(kept), slice_rows):
                part = logits[kept[start : start + slice_rows].to(logits.device)].to(wide)
                if top_k is not None:
                    part, found = torch.topk(part, min(top_k, part.shape[-1]), dim=-1)
                    best.append(found.to(torch.int32).cpu())
                parts.append(part.to(torch.float32).cpu())
            parts += best
        packed = nnsight.save(torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]))
        if not needs_head:
            tracer.stop()
    return packed
