"""Files that outlive the process: journals with one owner, and files that are replaced in one step.

``journal.py`` is the append-only file of the package (``docs/format.md``, "Journals"); ``records.py`` reads, checks and
encodes its records; ``new_file.py`` writes whole files.
"""

from .journal import Journal, has_magic, read_journal, reading, warn_caller, write_journal
from .new_file import replace_file
from .records import Body, Entry, Loss, Record

__all__ = [
    "Body",
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
