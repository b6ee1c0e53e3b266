"""`python -m bucketrl.jobs` is the `bucketrl` command."""

import sys

from bucketrl.jobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
