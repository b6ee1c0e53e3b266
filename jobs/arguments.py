"""The arguments of every command. Imports the standard library alone, so that `--help` answers at once; each
command names the function that runs it, which is imported when it is called.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

import bucketrl

ENGINES = ("auto", "vllm", "transformers")

_MEMBER_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)

Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Wrong arguments are one line and exit code 2, like all wrong input."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """`command` is `module:function` below `bucketrl.jobs`. Exits for --help, --version and wrong arguments."""
    parser = Parser(
        prog="bucketrl",
        description="Asynchronous GRPO on LoRA adapters for machines that share only a bucket.",
    )
    parser.add_argument("--version", action="version", version=f"bucketrl {bucketrl.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND", title="commands", dest="verb")
    _add_run(verbs)
    _add_roles(verbs)
    _add_measurements(verbs)
    _add_inspection(verbs)
    return parser.parse_args(argv)


def _add_run(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "run", help="proxy, rollout workers and learner on this machine, from a TOML file"
    )
    verb.set_defaults(command="local_commands:run")
    verb.add_argument("config", type=Path)
    verb.add_argument("--bucket", default="", metavar="URL", help="default: runs/<name>/bucket")
    verb.add_argument("--workers", type=positive, default=1, metavar="N")
    verb.add_argument("--engine", choices=ENGINES, default="auto")
    verb.add_argument("--port", type=port, default=0, metavar="P", help="of the proxy; default: any free one")
    verb.add_argument("--groups-in-flight", type=positive, metavar="N", help="default: what an engine holds")
    verb.add_argument("--kv-cache-mb", type=positive, metavar="N", help="default: the engine decides")
    _add_keep(verb, whole)
    verb.add_argument("--evaluate", type=positive, metavar="N", help="held-out problems, before and after")
    verb.add_argument("--plot", type=Path, metavar="PNG", help="default: runs/<name>/reward.png")
    verb.add_argument("--record", metavar="NAME", help="write benchmarks/results/NAME.json")


def _add_roles(verbs: Verbs) -> None:
    verb = verbs.add_parser("create", help="write run.json into an empty bucket; on the same run: join it")
    verb.set_defaults(command="role_commands:create")
    verb.add_argument("config", type=Path)
    verb.add_argument("--bucket", required=True, metavar="URL")

    verb = verbs.add_parser("proxy", help="serve leases, the newest version and the run's status")
    verb.set_defaults(command="role_commands:proxy")
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached by others (needs tokens)")
    verb.add_argument("--port", type=port, default=8080, metavar="P", help="0: any free one")

    verb = verbs.add_parser("rollout", help="sample, score and upload groups until the run is finished")
    verb.set_defaults(command="role_commands:rollout")
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.add_argument("--proxy", required=True, metavar="URL")
    _add_member(verb, "--worker-id")
    _add_engine(verb)
    verb.add_argument("--groups-in-flight", type=positive, metavar="N", help="default: what the engine holds")
    verb.add_argument(
        "--engines",
        type=positive,
        default=1,
        metavar="N",
        help="copies of the model, each on GPUs of its own",
    )
    verb.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="GPUs of each stage")
    verb.add_argument(
        "--pipeline-parallel", type=positive, default=1, metavar="N", help="stages of an engine"
    )
    verb.add_argument("--grace", type=above_zero, default=10.0, metavar="S", help="from SIGTERM to exit")
    verb.add_argument("--kv-cache-mb", type=positive, metavar="N", help="default: the engine decides")
    verb.add_argument("--gpu-memory-utilization", type=fraction, default=0.9, metavar="F")
    verb.add_argument("--reward-processes", type=positive, default=1, metavar="N")

    verb = verbs.add_parser("learner", help="train on what workers upload; resumes by itself")
    verb.set_defaults(command="role_commands:learner")
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.add_argument("--proxy", metavar="URL", help="needed only where the store cannot serialise commits")
    _add_member(verb, "--learner-id")
    verb.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    verb.add_argument("--threads", type=positive, metavar="N", help="of the CPU; default: torch decides")
    verb.add_argument(
        "--data-parallel", type=positive, default=1, metavar="N", help="processes, each on a GPU of its own"
    )
    verb.add_argument(
        "--poll",
        type=above_zero,
        default=2.0,
        metavar="S",
        help="between listings where no proxy tells of uploads",
    )
    _add_keep(verb, whole)


def _add_measurements(verbs: Verbs) -> None:
    verb = verbs.add_parser("doctor", help="check a configuration, and whether its task can teach its model")
    verb.set_defaults(command="model_commands:doctor")
    verb.add_argument("config", type=Path)
    verb.add_argument("--probe-task", action="store_true", help="sample groups and measure the signal")
    verb.add_argument("--prompts", type=positive, default=32, metavar="N")
    verb.add_argument("--engine", choices=ENGINES, default="auto")
    verb.add_argument("--seed", type=int, default=0, metavar="N")

    verb = verbs.add_parser("evaluate", help="held-out reward of committed policy versions")
    verb.set_defaults(command="model_commands:evaluate")
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.add_argument(
        "--version", type=version, action="append", metavar="N|latest", help="may be given several times"
    )
    verb.add_argument("--problems", type=positive, default=200, metavar="N")
    verb.add_argument("--temperature", type=above_zero, metavar="T", help="default: the run's own")
    _add_engine(verb)
    verb.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="default: ~/.cache/bucketrl")


def _add_inspection(verbs: Verbs) -> None:
    verb = verbs.add_parser("status", help="how a run goes, from its proxy or its bucket")
    verb.set_defaults(command="inspect_commands:status")
    where = verb.add_mutually_exclusive_group(required=True)
    where.add_argument("--proxy", metavar="URL")
    where.add_argument("--bucket", metavar="URL")

    verb = verbs.add_parser(
        "audit", help="prove from the bucket alone that nothing was lost or trained twice"
    )
    verb.set_defaults(command="inspect_commands:run_audit")
    verb.add_argument("bucket", metavar="BUCKET_URL")

    verb = verbs.add_parser("gc", help="remove what older commits needed; a learner does it by itself")
    verb.set_defaults(command="inspect_commands:run_gc")
    verb.add_argument("bucket", metavar="BUCKET_URL")
    _add_keep(verb, positive)
    verb.add_argument("--dry-run", action="store_true", help="only show what would go")

    verb = verbs.add_parser("report", help="summary, plot and benchmark record of a run")
    verb.set_defaults(command="inspect_commands:run_report")
    verb.add_argument("bucket", metavar="BUCKET_URL")
    verb.add_argument("--plot", type=Path, metavar="PNG")
    verb.add_argument("--record", metavar="NAME", help="write benchmarks/results/NAME.json")
    verb.add_argument("--command-line", default="", help="for the record: the command that made the run")
    verb.add_argument("--notes", default="", help="for the record")

    verb = verbs.add_parser("replay", help="train the same batches again and compare every adapter's bytes")
    verb.set_defaults(command="inspect_commands:run_replay")
    verb.add_argument("source", metavar="BUCKET_URL")
    verb.add_argument("target", metavar="EMPTY_BUCKET_URL")


def _add_keep(verb: Parser, number: Callable[[str], int]) -> None:
    everything = "; 0 keeps everything" if number is whole else ""
    verb.add_argument(
        "--keep",
        type=number,
        metavar="N",
        help="commits whose trajectories, batches and adapters stay in the bucket; default: 64" + everything,
    )


def _add_engine(verb: Parser) -> None:
    verb.add_argument("--engine", choices=(*ENGINES, "http"), default="auto")
    verb.add_argument(
        "--engine-url", default="", metavar="URL", help="of your own vllm serve, for --engine http"
    )


def _add_member(verb: Parser, flag: str) -> None:
    verb.add_argument(
        flag, dest="member_id", type=member_id, metavar="ID", help="default: host name and a random part"
    )
    verb.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="default: ~/.cache/bucketrl")


def positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return value


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; want 0 to 65535")
    return int(text)


def above_zero(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and up to 1")
    return value


def version(text: str) -> int | None:
    """None is the newest."""
    if text == "latest":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a version number nor latest")
    return int(text)


def member_id(text: str) -> str:
    if not _MEMBER_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: want lower case letters, digits and dashes, 64 at most")
    return text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
