"""The `bucketrl` command. Parses first, imports later: `--help` loads neither torch nor vLLM.

Exit codes: 0 done, 1 a failure with its traceback, 2 wrong input (one line), 3 fenced by a newer learner.
"""

import argparse
import logging
import sys

import bucketrl
from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.bucket.errors import Fenced, UserError
from bucketrl.jobs import inspect_commands, local_commands, model_commands, role_commands
from bucketrl.tasks.base import TaskError

LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt="%H:%M:%S", stream=sys.stderr)
    for chatty in ("httpx", "httpcore", "botocore", "aiobotocore", "s3fs", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        code: int = arguments.command(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bucketrl",
        description="Asynchronous GRPO on LoRA adapters for machines that share only a bucket.",
    )
    parser.add_argument("--version", action="version", version=f"bucketrl {bucketrl.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    local_commands.add_arguments(verbs)
    role_commands.add_arguments(verbs)
    model_commands.add_arguments(verbs)
    inspect_commands.add_arguments(verbs)
    return parser
