"""python -m benchmarks.smollm2: SmolLM2-135M-Instruct, recorded. About a minute a step on 2 cores."""

import sys

from benchmarks.whole_run import run

if __name__ == "__main__":
    sys.exit(run("smollm2", "smollm2"))
