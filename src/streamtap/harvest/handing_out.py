"""``HandingOut``: which shard goes to which engine, where engines come and go; it runs nothing itself."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from streamtap.harvest.plan import ShardPlan

#: Shards that an engine has at a time: one that runs, and one that is uploaded.
AT_ONCE = 2


@dataclass
class _Hands:
    """What an engine has: shards at work, and numbers of shards that lie whole in its spool."""

    busy: dict[int, ShardPlan] = field(default_factory=dict)
    spooled: set[int] = field(default_factory=set)


class HandingOut:
    """Hands out ``plans`` in their order, the least busy engine first; what came back goes first.

    A shard that lies in an engine's spool is kept for that engine, so that it is not run again. Of the plans that wait,
    it holds a few.
    """

    def __init__(self, plans: Iterator[ShardPlan]) -> None:
        self._plans = plans
        self._waiting: deque[ShardPlan] = deque()
        self._hands: dict[int, _Hands] = {}
        self._tries: Counter[int] = Counter()

    def join(self, engine: int, spooled: Iterable[int] = ()) -> None:
        """An engine is ready; ``spooled`` are numbers of shards that it need not run again."""
        self._hands[engine] = _Hands(spooled=set(spooled))

    def leave(self, engine: int) -> list[ShardPlan]:
        """An engine is gone; the shards that it had at work are the caller's now."""
        hands = self._hands.pop(engine, None)
        return [] if hands is None else list(hands.busy.values())

    def next(self) -> tuple[int, ShardPlan] | None:
        """An engine that has a hand free, and its next shard; None where there is no such engine or shard."""
        free = sorted((len(hands.busy), engine) for engine, hands in self._hands.items() if len(hands.busy) < AT_ONCE)
        for _, engine in free:
            if plan := self._for(engine):
                self._waiting.remove(plan)
                self._hands[engine].busy[plan.number] = plan
                return engine, plan
        return None

    def made(self, engine: int, plan: ShardPlan) -> None:
        """A shard is whole at the place."""
        hands = self._hands[engine]
        del hands.busy[plan.number]
        hands.spooled.discard(plan.number)
        self._tries.pop(plan.number, None)

    def failed(self, engine: int, plan: ShardPlan, *, spooled: bool) -> int:
        """A shard has to be tried again, by ``engine`` where it has it in its spool; how often it was tried."""
        hands = self._hands[engine]
        del hands.busy[plan.number]
        if spooled:
            hands.spooled.add(plan.number)
        return self.again(plan)

    def again(self, plan: ShardPlan) -> int:
        """A shard has to be run again; how often it was tried."""
        self._tries[plan.number] += 1
        self._waiting.appendleft(plan)
        return self._tries[plan.number]

    def wanted(self, most: int) -> int:
        """Of ``most`` engines, how many would have something to do."""
        busy = sum(len(hands.busy) for hands in self._hands.values())
        self._look_ahead(most - busy)
        return min(most, busy + len(self._waiting))

    def _for(self, engine: int) -> ShardPlan | None:
        own = self._hands[engine].spooled
        others = {number for each, hands in self._hands.items() if each != engine for number in hands.spooled}
        self._look_ahead(1 + len(others))
        mine = (plan for plan in self._waiting if plan.number in own)
        free = (plan for plan in self._waiting if plan.number not in others)
        return next(mine, None) or next(free, None)

    def _look_ahead(self, n_plans: int) -> None:
        while len(self._waiting) < n_plans and (plan := next(self._plans, None)) is not None:
            self._waiting.append(plan)
