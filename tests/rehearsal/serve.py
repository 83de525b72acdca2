"""A process that has the device and calls functions for `tests.rehearsal.process`.

Each line of standard input is a JSON object {"function": "module:name", "arguments": {...}}; the
answer is a line of standard output, {"result": ...} or {"error": traceback}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

from tests.rehearsal import device


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints is not an answer
    device.install()
    for line in sys.stdin:
        request = json.loads(line)
        module, name = request["function"].split(":")
        try:
            function = getattr(importlib.import_module(module), name)
            answer = {"result": function(**request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
