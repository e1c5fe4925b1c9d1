"""The statements that every request sends, compiled once: SQLAlchemy's own way takes longer than the database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from sqlalchemy import ClauseElement, Column, Connection, Dialect
from sqlalchemy.types import TypeEngine

Convert = Callable[[Any], Any]


class Prepared:
    """A statement as the driver takes it, in the transaction of whatever connection it is given.

    ``keys`` are the columns that an INSERT fills, by default all. ``columns`` are those that come back.
    """

    def __init__(self, statement: ClauseElement, *columns: Column[Any], keys: Collection[str] | None = None) -> None:
        self._statement = statement
        self._keys = keys
        self._columns = columns
        self._names = [column.name for column in columns]
        self._for: dict[str, _Compiled] = {}

    def run(self, connection: Connection, values: Mapping[str, Any]) -> Any:
        """Send it with a value for each of its parameters; gives the driver's cursor."""
        compiled = self._compiled(connection.dialect)
        driver = connection.connection.dbapi_connection
        assert driver is not None
        return driver.execute(compiled.text, compiled.parameters(values))

    def rows(self, connection: Connection, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Send it; gives what comes back, as the driver has it."""
        found: list[tuple[Any, ...]] = self.run(connection, values).fetchall()
        return found

    def first(self, connection: Connection, values: Mapping[str, Any]) -> Any | None:
        """Send it; gives the first row that comes back, its columns by name, or None."""
        rows = self.rows(connection, values)
        if not rows:
            return None
        found = dict(zip(self._names, rows[0], strict=True))
        for name, convert in self._compiled(connection.dialect).read:
            found[name] = convert(found[name])
        return SimpleNamespace(**found)

    def _compiled(self, dialect: Dialect) -> _Compiled:
        compiled = self._for.get(dialect.name)
        if compiled is None:
            compiled = self._for[dialect.name] = _Compiled(self._statement, self._columns, self._keys, dialect)
        return compiled


class _Compiled:
    """A statement in the words of one dialect, with what makes its values the driver's."""

    def __init__(
        self,
        statement: ClauseElement,
        columns: Collection[Column[Any]],
        keys: Collection[str] | None,
        dialect: Dialect,
    ) -> None:
        compiled: Any = statement.compile(dialect=dialect, column_keys=None if keys is None else list(keys))
        self.text = str(compiled)
        self._by_place = compiled.positiontup is not None
        self._names: list[str] = compiled.positiontup or list(compiled.binds)
        self._write = _converters({name: bind.type for name, bind in compiled.binds.items()}, dialect, "bind_processor")
        self.read = _converters({column.name: column.type for column in columns}, dialect, "result_processor", None)

    def parameters(self, values: Mapping[str, Any]) -> list[Any] | dict[str, Any]:
        """``values`` as the driver takes them: by place or by name."""
        told = {name: values[name] for name in self._names}
        for name, convert in self._write:
            told[name] = convert(told[name])
        return [told[name] for name in self._names] if self._by_place else told


def _converters(
    types: Mapping[str, TypeEngine[Any]], dialect: Dialect, kind: str, *more: Any
) -> list[tuple[str, Convert]]:
    found = {name: getattr(type_.dialect_impl(dialect), kind)(dialect, *more) for name, type_ in types.items()}
    return [(name, convert) for name, convert in found.items() if convert is not None]
