"""What the Hub's client says of its progress, passed on without a bar of its own."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from streamtap.dataset.places import Advance


class Told:
    """Passes on what the client tells the bars of one download."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._n_bytes = 0

    def bar_class(self) -> type[Bar]:
        """The class that the client is given: it makes its bars itself, and looks what the class can do."""
        return type("ToldBar", (Bar,), {"told": self})

    def add(self, n_bytes: int) -> None:
        """Bytes came; negative where the client starts anew."""
        self._n_bytes += n_bytes
        self._advance(n_bytes)

    def take_back(self) -> None:
        """A download that failed starts anew."""
        if self._n_bytes:
            self.add(-self._n_bytes)


class Bar:
    """As much of a bar as the client uses."""

    told: ClassVar[Told]

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.n = 0
        self.total: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def update(self, n: float | None = 1) -> None:
        """Bytes of the file came."""
        self.told.add(int(n or 0))

    def update_transfer(self, n: float | None = 1) -> None:
        """Bytes came over the wire, which are other ones where they are packed."""

    def set_postfix_str(self, *_args: Any, **_options: Any) -> None:
        """Nothing is shown."""

    def set_transfer_postfix_str(self, *_args: Any, **_options: Any) -> None:
        """Nothing is shown."""

    def refresh(self) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing is open."""
