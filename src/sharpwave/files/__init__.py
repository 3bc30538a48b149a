"""Files that outlive the process: journals with one owner, and files that are replaced in one step.

``journal.py`` is the one append-only format of the package (``docs/format.md``, "Journals"); ``records.py`` is how its
bytes are read and checked; ``replaced.py`` writes whole files; ``safetensors.py`` is the layout of files that hold
named arrays.
"""

from .journal import Journal, read_journal, write_journal
from .records import Entry, Record
from .replaced import replace_file, save_path

__all__ = ["Entry", "Journal", "Record", "read_journal", "replace_file", "save_path", "write_journal"]
