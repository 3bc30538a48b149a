"""`python`: the command of another Python process that finds the same modules as this one."""

from __future__ import annotations

import sys

__all__ = ["python"]


def python(function: str, *arguments: str) -> list[str]:
    """Calls "module:function" in a new process; its `sys.argv[1:]` are the arguments.

    Module paths go by an argument. In PYTHONPATH they would reach every program that the process starts, another Python
    among them. Until they are set nothing is imported: a file in the current folder would be found first.
    """
    module, _, name = function.partition(":")
    code = f"import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from {module} import {name}; {name}()"
    return [sys.executable, "-c", code, "\n".join(sys.path), *arguments]
