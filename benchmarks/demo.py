"""python -m benchmarks.demo: the quick demo, recorded. About 4 minutes on 2 cores."""

import sys

from benchmarks.whole_run import run

if __name__ == "__main__":
    sys.exit(run("tiny", "demo"))
