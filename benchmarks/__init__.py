"""Each `python -m benchmarks.<name>` prints a short table and writes `benchmarks/results/<name>.json`."""
