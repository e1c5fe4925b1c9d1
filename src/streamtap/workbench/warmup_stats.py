"""What a warm-up found and did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamtap.spec import CaptureSpec
from streamtap.workbench.lacking import Need, scores_of


@dataclass(frozen=True)
class WarmupStats:
    """Counts of prompts, repeated ones counted each time; ``elapsed_seconds`` is wall time."""

    total_prompts: int
    activations_cached: int
    activations_extracted: int
    perplexity_cached: int = 0
    perplexity_extracted: int = 0
    elapsed_seconds: float = 0.0
    logits_cached: int = 0
    logits_extracted: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompts whose rows were all there already, 0 to 1."""
        return self.activations_cached / self.total_prompts if self.total_prompts else 0.0

    def __str__(self) -> str:
        """One line, as the class's name and its counts."""
        logits = self.logits_cached + self.logits_extracted
        parts = [
            f"total={self.total_prompts}",
            f"activations={self.activations_cached} cached + {self.activations_extracted} extracted",
            f"perplexity={self.perplexity_cached} cached + {self.perplexity_extracted} extracted",
            *([f"logits={self.logits_cached} cached + {self.logits_extracted} extracted"] if logits else []),
            f"time={self.elapsed_seconds:.1f}s",
        ]
        return f"WarmupStats({', '.join(parts)})"


def stats_of(
    spec: CaptureSpec, needs: Mapping[Need, Sequence[int]], total: int, seconds: float, *, has_layers: bool
) -> WarmupStats:
    """What a warm-up of ``total`` prompts under ``spec`` comes to, which lacked ``needs``."""

    def extracted(kind: str) -> int:
        return sum(len(places) for need, places in needs.items() if kind in need.scores)

    rows = sum(len(places) for need, places in needs.items() if need.layers)
    asked = scores_of(spec)
    return WarmupStats(
        total_prompts=total,
        activations_cached=total - rows if has_layers else 0,
        activations_extracted=rows,
        perplexity_cached=total - extracted("perplexity") if "perplexity" in asked else 0,
        perplexity_extracted=extracted("perplexity"),
        elapsed_seconds=seconds,
        logits_cached=total - extracted("logits") if "logits" in asked else 0,
        logits_extracted=extracted("logits"),
    )
