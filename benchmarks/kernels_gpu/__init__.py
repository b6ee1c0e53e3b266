"""The learner's kernels on a GPU: right against float64 first, then timed in turns with what else there is."""
