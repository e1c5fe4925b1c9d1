"""The tables of the index, and whether this version may read them."""

from __future__ import annotations

import sqlite3

from streamtap.errors import Unsupported

MAJOR, MINOR = 1, 0

# Entries, texts and prompts meet by digest, so that a look-up is one probe of one tree.
TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS memo (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS texts (context BLOB NOT NULL, text BLOB NOT NULL, digest BLOB NOT NULL,
       note INTEGER NOT NULL, PRIMARY KEY (context, text)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS prompts (digest BLOB PRIMARY KEY, token_ids BLOB NOT NULL, positions BLOB)",
    """CREATE TABLE IF NOT EXISTS sets (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE,
       identity TEXT NOT NULL, provenance TEXT NOT NULL, created REAL NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS parts (id INTEGER PRIMARY KEY AUTOINCREMENT, set_id INTEGER NOT NULL,
       layout TEXT NOT NULL, rows INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'open'
       CHECK (state IN ('open', 'full', 'dropped')))""",
    """CREATE TABLE IF NOT EXISTS entries (set_id INTEGER NOT NULL, digest BLOB NOT NULL, part_id INTEGER NOT NULL,
       first_row INTEGER NOT NULL, n_rows INTEGER NOT NULL, PRIMARY KEY (set_id, digest, part_id)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS damaged (id INTEGER PRIMARY KEY, set_id INTEGER NOT NULL, digest BLOB NOT NULL,
       part_id INTEGER NOT NULL, first_row INTEGER NOT NULL, n_rows INTEGER NOT NULL, noticed REAL NOT NULL,
       why TEXT NOT NULL)""",
)


def is_ready(db: sqlite3.Connection, path: str) -> bool:
    """Whether the tables are there.

    Raises:
        Unsupported: a newer version of Streamtap made them.
    """
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return False
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None:
        return False
    if int(row[0].partition(".")[0]) > MAJOR:
        raise Unsupported(
            f"the cache index {path} has schema {row[0]}, and this Streamtap reads up to {MAJOR}.x: "
            "upgrade streamtap, or name another cache folder."
        )
    return True


def create(db: sqlite3.Connection) -> None:
    """Make the tables; does nothing where another process was quicker."""
    for statement in TABLES:
        db.execute(statement)
    db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (f"{MAJOR}.{MINOR}",))
