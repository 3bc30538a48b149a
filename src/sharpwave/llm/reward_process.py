"""The process in which a reward function runs: a question a line, an answer a line, both JSON.

It is started as a script and imports nothing of sharpwave, so that it begins at once and needs little memory. What the
function prints goes to the error stream. It ends with its parent, in the middle of a call, too, and the programs that
the function has started end with it.
"""

import importlib
import json
import os
import select
import signal
import sys
import threading
from typing import Any


def _end_with_parent() -> None:
    hang_up = select.poll()
    hang_up.register(0, 0)  # nothing is waited for but the end
    hang_up.poll()
    if os.getpid() == os.getpgid(0):  # its session is its own
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the pipe is for answers only
    sys.path[:] = json.loads(sys.argv[2])  # those of the parent; without the folder of this script
    try:
        module, _, name = sys.argv[1].partition(":")
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:
        print(json.dumps({"broken": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        said: dict[str, Any]
        try:
            said = {"reward": float(function(asked["item"], asked["text"]))}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
