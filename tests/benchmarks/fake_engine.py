"""An engine for the tests of benchmarks/engines.py: python fake_engine.py WHAT [FILE]

WHAT: ready, or where it fails: dies or hangs, before or after it is ready.
FILE: takes down when it began, its process and that of a child of it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from engines import serve


def start():
    what, *files = sys.argv[1:]
    began = time.monotonic()
    for file in files:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(file).write_text(json.dumps({"began": began, "processes": [os.getpid(), child.pid]}))
    print("to the log by print")
    subprocess.run([sys.executable, "-c", "print('to the log by a child', input('') or 1)"])
    if what == "dies":
        raise ValueError("no such kernel")
    if what == "hangs":
        time.sleep(60)

    def answer(question):
        if question == "die":
            os._exit(7)
        if question == "hang":
            time.sleep(60)
        if question == "times":
            return sum(os.times()[:2])
        return {"asked": question, "threads": os.environ["OMP_NUM_THREADS"]}

    return {"began": began, "caches": os.environ["VLLM_CACHE_ROOT"]}, answer


serve(start)
