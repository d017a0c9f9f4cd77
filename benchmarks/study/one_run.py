"""One run of a study: ``python -m benchmarks.study.one_run RESULT`` reads it as one JSON line from standard input.

It ends as soon as standard input does: a study that was killed leaves no run behind.
"""

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

from benchmarks.pipeline_corpora import Corpus
from benchmarks.study.kinds import run
from lightning_blocktrain.demo.curves import write_whole


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not through a buffer, whose lock the interpreter's end would want
        pass
    os.killpg(0, signal.SIGKILL)  # with whatever the run has started


def main() -> None:
    """Do the run and write its result."""
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore")
    result = run(told["run"]["kind"], told["run"]["options"], Corpus(**told["corpus"]), told["run"]["seed"])
    write_whole(Path(sys.argv[1]), json.dumps(result).encode())


if __name__ == "__main__":
    main()
