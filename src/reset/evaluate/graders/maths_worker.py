"""Compares expressions by math-verify. A script: started by maths.py, never imported.

    python maths_worker.py MEMORY_BYTES     a request {"right", "given"} a line, a reply a line

Says {"ready": true} once math-verify is loaded. Needs math-verify and the standard library alone.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its code.py is not the standard library's

import json
import resource


def main() -> None:
    if sys.platform == "linux":  # elsewhere the address space has no limit; the time has
        limit = int(sys.argv[1])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))

    from math_verify import parse, verify

    reply({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        right, given = (parse(f"${request[name].replace('$', '')}$") for name in ("right", "given"))
        reply({"equal": bool(verify(right, given))})


def reply(record: dict[str, bool]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
