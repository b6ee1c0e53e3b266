"""The `bucketrl` command. Parses first, imports later: `--help` loads nothing that it does not need.

Exit codes: 0 done; 1 a failure (with its traceback) or a finding (an audit's violation, a replay's
difference); 2 wrong input (one line); 3 fenced by a newer learner (one line); 130 stopped by a signal.
"""

import importlib
import logging
import sys

from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.bucket.errors import Fenced, UserError
from bucketrl.jobs.arguments import parse
from bucketrl.tasks.base import TaskError

LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = parse(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt="%H:%M:%S", stream=sys.stderr)
    for chatty in ("httpx", "httpcore", "botocore", "aiobotocore", "s3fs", "urllib3", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    module, _, function = arguments.command.partition(":")
    try:
        command = getattr(importlib.import_module(f"bucketrl.jobs.{module}"), function)
        code: int = command(arguments)
    except (UserError, TaskError, ProxyRefused) as error:
        return _complain(error, 2)
    except Fenced as error:
        return _complain(error, 3)
    except ProxyUnavailable as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    return code


def _complain(error: Exception, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code
