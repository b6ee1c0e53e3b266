"""Programs as answers, and their tests: the verifier `python_tests` of JSONL tasks.

A row's answer is one of
- a list of strings, each of them a test: `["assert add(1, 2) == 3", ...]` (MBPP's `test_list`)
- a string of test code, one test: HumanEval's `test` with `check(<entry point>)` put behind it
- a list of `{"input": ..., "output": ...}`: what the program reads and has to print, up to white space
- `{"inputs": [...], "outputs": [...]}`, the same (APPS's `input_output`); a string with the JSON of any of
  these is read as that

Tests of a program's functions run in one sandbox and the program in another (`tasks.code_peer`); what a program
reads and prints is compared here. A program therefore does not pass by ending early, by printing what looks like
a verdict, by values that claim to equal everything, or by changing built-ins or the assertions; and it cannot
read what is expected. What still works: answering only for the inputs that the prompt shows; guessing from a
test's inputs what it expects; objects of the program's own classes that claim to equal each other; changing an
argument in place. Tests should be many, compare values, and stay out of the prompt.

Differences from tests in one process: a program's objects can be called, iterated, indexed and asked for
attributes, but have no arithmetic and no order; objects of a test's own classes cannot be used by the program; a
built-in name in a test is always Python's; programs have the standard library only.
"""

import ast
import functools
import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bucketrl.tasks.answers import same_text
from bucketrl.tasks.base import TaskError
from bucketrl.tasks.sandbox import Limits, SandboxResult, run_python

logger = logging.getLogger(__name__)

_PEER = Path(__file__).with_name("code_peer.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class CallTests:
    """Code that calls what the program defines. The tests share their names, in this order."""

    code: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OutputTests:
    """What the program reads and what it has to print."""

    pairs: tuple[tuple[str, str], ...]


def parse_tests(value: Any) -> CallTests | OutputTests:
    """Raises ValueError that says what is wrong."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except ValueError:
            pass  # it is code
    match value:
        case str() if value.strip():
            return _call_tests([value])
        case [str(), *_] if all(isinstance(test, str) for test in value):
            return _call_tests(value)
        case [dict(), *_] if all(isinstance(test, dict) for test in value):
            pairs = [(test.get("input"), test.get("output")) for test in value]
        case {"inputs": [_, *_] as inputs, "outputs": list() as outputs} if len(inputs) == len(outputs):
            pairs = list(zip(inputs, outputs, strict=True))
        case _:
            raise ValueError("no tests; use test code, a list of asserts, or inputs and outputs")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ValueError("an input or output is missing or not text")
    return OutputTests(tuple((str(read), str(printed)) for read, printed in pairs))


def _call_tests(code: list[str]) -> CallTests:
    for test in code:
        try:
            ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"a test is not Python ({error})") from None
    return CallTests(tuple(code))


def share_passed(
    program: str, tests: CallTests | OutputTests, limits: Limits, *, stop_at_failure: bool
) -> float:
    """Share of the tests that pass, in [0, 1]; with `stop_at_failure` what is below 1 is a lower bound.

    `limits.wall_seconds` is for all tests together. Blocks. Raises TaskError for tests that do not use the
    program, SandboxError if nothing can be run.
    """
    if isinstance(tests, OutputTests):
        return _outputs_passed(program, tests, limits, stop_at_failure)
    verdict = _run_both(
        f"{_PEER}\nserve({program!r})", f"{_PEER}\njudge({list(tests.code)!r}, {stop_at_failure})", limits
    )
    results, _, asked = verdict.stdout.partition(" ")
    share = results.count("1") / len(tests.code)
    if share == 1.0 and asked == "0":
        raise TaskError(
            f"tests pass without any use of the program: {tests.code[0][:100]!r}; call its functions"
        )
    return share


def _outputs_passed(program: str, tests: OutputTests, limits: Limits, stop_at_failure: bool) -> float:
    end = time.monotonic() + limits.wall_seconds
    passed = 0
    for read, printed in tests.pairs:
        remaining = end - time.monotonic()
        if remaining <= 0:
            break
        result = run_python(program, stdin=read, limits=replace(limits, wall_seconds=remaining))
        _warn_of_missing(result.layers)
        right = result.outcome == "exited" and result.exit_code == 0 and same_text(result.stdout, printed)
        passed += right
        if stop_at_failure and not right:
            break
    return passed / len(tests.pairs)


def _run_both(program: str, tests: str, limits: Limits) -> SandboxResult:
    """Runs both sides, joined by a channel that closes when either ends; how the side of the tests ended."""
    ends = socket.socketpair()

    def run(source: str, end: socket.socket) -> SandboxResult:
        try:
            return run_python(source, limits=limits, channel=end.fileno())
        finally:
            end.shutdown(socket.SHUT_RDWR)

    with closing(ends[0]), closing(ends[1]), ThreadPoolExecutor(max_workers=1) as other:
        answering = other.submit(run, program, ends[0])
        verdict = run(tests, ends[1])
        _warn_of_missing(answering.result().layers)
    return verdict


@functools.cache
def _warn_of_missing(layers: tuple[str, ...]) -> None:
    missing = {"files", "syscalls"}.difference(layers)
    if missing and layers:
        logger.warning(
            "sandbox: this machine does not allow %s; programs are confined less (tasks/sandbox.py)",
            " and ".join(sorted(missing)),
        )
