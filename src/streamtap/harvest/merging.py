"""``InOrder``: records of shards that come in any order, merged in the order of their numbers."""

from __future__ import annotations

from streamtap.harvest.finishing import Totals
from streamtap.harvest.record import ShardRecord, read_record, record_name
from streamtap.harvested.places import WritablePlace

_MOST_HELD = 64


class InOrder:
    """Totals of a run whose shards are made by many; of records that came early it holds at most ``most_held``.

    The others are read again from ``place`` when it is their turn, so that one slow shard costs no memory.
    """

    def __init__(self, place: WritablePlace, *, most_held: int = _MOST_HELD) -> None:
        self.totals = Totals()
        self._place, self._most_held = place, most_held
        self._early: dict[int, ShardRecord | None] = {}

    def take(self, record: ShardRecord) -> None:
        """One more shard is whole."""
        held = sum(each is not None for each in self._early.values())
        is_next = record.number == len(self.totals.shards)
        self._early[record.number] = record if is_next or held < self._most_held else None
        while (number := len(self.totals.shards)) in self._early:
            self.totals.take(self._early.pop(number) or self._read(number))

    def _read(self, number: int) -> ShardRecord:
        name = record_name(number)
        return read_record(self._place.get(name), name)
