"""Files that outlive the process: journals with one owner, and files that are replaced in one step.

``journal.py`` is the one append-only format of the package (``docs/format.md``, "Journals"); ``records.py`` is how its
bytes are read and checked; ``replaced.py`` writes whole files.
"""

from .journal import Journal, read_journal, write_journal
from .records import Entry, Record
from .replaced import replace_file

__all__ = ["Entry", "Journal", "Record", "read_journal", "replace_file", "write_journal"]
