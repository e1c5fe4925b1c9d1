"""Text datasets of the Hub, streamed by the ``datasets`` library: nothing is downloaded whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from streamtap.errors import DatasetNotFound, InvalidInput, MissingExtra, TransferFailed
from streamtap.workbench.prompt_columns import choose_column

# Rows that are looked at where nobody names the column.
_LOOKED_AT = 100


def hub_values(
    repository: str, *, column: str | None, limit: int | None, config: str | None, split: str, revision: str | None
) -> tuple[Iterator[tuple[str, Any]], int | None]:
    """Place, for errors, and value of each row of a dataset's ``column``, and the number of rows where it is known.

    Raises:
        MissingExtra: the library is not installed.
        DatasetNotFound: no such dataset, or none that this token may see.
        InvalidInput: no such config, split or column.
        TransferFailed: the Hub failed for longer than the library waits.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            "text datasets of the Hub are read with datasets: pip install 'streamtap[corpora]'."
        ) from error

    with _hub_errors(repository):
        stream = datasets.load_dataset(repository, config, split=split, revision=revision, streaming=True)
    with _hub_errors(repository):
        chosen = column or choose_column(_columns(stream.take(_LOOKED_AT)), repository)
    if stream.column_names is not None:
        if chosen not in stream.column_names:
            raise InvalidInput(
                f"{repository} has no column {chosen!r}; its columns are {', '.join(map(repr, stream.column_names))}."
            )
        # Of Parquet the other columns are then not even fetched.
        stream = stream.select_columns([chosen])
    known = stream.info.splits
    n_rows = known[split].num_examples if known and split in known else None
    return _values(stream, repository, chosen, limit), _least(n_rows, limit)


def _values(stream: Any, repository: str, column: str, limit: int | None) -> Iterator[tuple[str, Any]]:
    with _hub_errors(repository):
        for number, row in enumerate(islice(stream, limit)):
            place = f"{repository}, row {number}"
            if column not in row:
                raise InvalidInput(f"{place} has no {column!r}; it has {', '.join(map(repr, row)) or 'nothing'}.")
            yield f"{place}, {column!r}", row[column]


def _columns(rows: Any) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in dict[str, Any](row).items():
            columns.setdefault(name, []).append(value)
    return columns


def _least(count: int | None, limit: int | None) -> int | None:
    if count is None or limit is None:
        return count
    return min(count, limit)


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """The library's errors as ours; their texts hold addresses, which may be signed, and are not repeated."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except InvalidInput:
        raise
    except FileNotFoundError as error:
        raise DatasetNotFound(
            f"there is no dataset {repository} on the Hub with text in it, or none that this token may see; a file of "
            "this machine is named with its folder: ./name."
        ) from error
    except (HfHubHTTPError, ConnectionError, TimeoutError) as error:
        raise TransferFailed(
            f"the Hub did not give {repository} ({type(error).__name__}); the same call goes on from the shards that "
            "are whole."
        ) from error
    except (DatasetsError, ValueError) as error:
        raise InvalidInput(f"{repository} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
