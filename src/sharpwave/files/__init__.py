"""Files that outlive the process: journals with one owner, and files that are replaced in one step.

``journal.py`` is the one append-only format of the package (``docs/format.md``, "Journals"); ``records.py`` is how its
bytes are read and checked; ``replaced.py`` writes whole files.
"""

from .journal import Journal, has_magic, read_journal, reading, warn_caller, write_journal
from .records import Entry, Loss, Record
from .replaced import replace_file

__all__ = [
    "Entry",
    "Journal",
    "Loss",
    "Record",
    "has_magic",
    "read_journal",
    "reading",
    "replace_file",
    "warn_caller",
    "write_journal",
]
