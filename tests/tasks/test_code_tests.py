"""Programs against their tests: right ones pass, wrong and cheating ones do not."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.tasks.answers import extract_answer
from bucketrl.tasks.base import TaskError
from bucketrl.tasks.code_peer import Peer, Remote
from bucketrl.tasks.code_tests import parse_tests, share_passed
from bucketrl.tasks.load import load_task
from bucketrl.tasks.sandbox import Limits

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add([1], [2]) == [1, 2]"]


def share(program: str, tests: Any = ADD_TESTS, *, stop: bool = False, wall_seconds: float = 10.0) -> float:
    return share_passed(program, parse_tests(tests), Limits(wall_seconds=wall_seconds), stop_at_failure=stop)


HUMANEVAL = """
METADATA = {"author": "me"}
def check(candidate):
    assert candidate([1.0, 2.0], 0.5) is False
    assert candidate([1.0, 1.2], 0.5)
check(has_close)
"""


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (ADD, ADD_TESTS),
        ("def has_close(xs, t):\n    return any(abs(a - b) < t for a, b in zip(xs, xs[1:]))", HUMANEVAL),
        ("def half(x): return x / 2", ["import math", "assert math.isclose(half(0.2), 0.1)"]),
        ("def neg(x): raise KeyError('neg')", "try:\n    neg(-1)\n    assert 0\nexcept KeyError: pass"),
        ("def order(x): x.sort(); x[0] = []", "x = [3, 1]\norder(x)\nassert x == [[], 3]"),
        ("def each(f, xs): return [f(x) for x in xs]", "assert each(lambda x: x + 1, iter((1, 2))) == [2, 3]"),
        ("def each(f, xs): return [f(x) for x in xs]", "assert each(int, range(2)) == [0, 1]"),
        ("def count(n): yield from range(n)", "assert list(count(3)) == [0, 1, 2]"),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def __len__(self): return len(self.items)",
            "s = Stack()\ns.push(1)\ns.push('a')\nassert len(s) == 2 and s.items == [1, 'a']",
        ),
        ("from collections import Counter as c", "from solution import c\nassert c('aab') == dict(a=2, b=1)"),
        ("print('noise ' * 99)\ndef f(x): print(x); return x", "print(f(1))\nassert f(2) == 2"),
        ("print(int(input()) + 1)", [{"input": "1", "output": "2"}, {"input": "2\n", "output": "3\n"}]),
        ("import sys\nif __name__ == '__main__': print('yes'); sys.exit(0)", {"inputs": [""], "outputs": ["yes"]}),
    ],
)  # fmt: skip
def test_a_right_program_passes(program: str, tests: Any) -> None:
    assert share(program, tests) == 1.0
    if not isinstance(tests, str):
        assert share(program, json.dumps(tests)) == 1.0


EQUALS_ALL = """
class Any_(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
class Any2:
    __eq__ = lambda self, other: True
    __contains__ = __eq__
add = lambda a, b: Any2() if isinstance(a, list) else Any_(7)
"""
FORGE = """
import os, threading
for fd in range(1, 20):
    try: os.write(fd, b"111 5")
    except OSError: pass
"""
PATCH = """
import builtins, sys
builtins.AssertionError = Exception
builtins.isinstance = builtins.all = builtins.any = lambda *_: True
builtins.exec = builtins.compile = lambda *_, **__: None
sys.modules["__main__"].OPERATIONS["call"] = lambda *_, **__: None
"""
ESCAPE = """
import sys
peer = sys._getframe(1).f_globals["Peer"]
def add(a, b):
    import gc
    [mine] = [one for one in gc.get_objects() if isinstance(one, peer)]
    for operation in ("getattr", "call", "str"):
        for target in ({"type": "type"}, {"yours": 0}, {"yours": "add"}, {"type": "exec"}):
            mine._send({"ask": operation, "arguments": [target, "print('111 1')"], "named": {}})
    return 7
"""


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a - b",
        "def sum(a, b): return a + b",
        "def add(a, b): return a +",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        f"{ADD}\nraise SystemExit",
        "def add(a, b): import os; os._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b): raise AssertionError",
        "print('111 3')",
        EQUALS_ALL,
        FORGE,
        PATCH,
        ESCAPE,
        "def add(a, b): return add(a, b)",
        "def add(a, b): x = []; x.append(x); return x",
        "def add(a, b): return type('T', (), {'__getattr__': lambda *_: 1})()",
        "import os\nfor fd in range(30):\n    try: os.write(fd, b'{' * 999)\n    except OSError: pass",
        "import os; os.closerange(0, 50)",
    ],
)
def test_a_wrong_or_cheating_program_passes_nothing(program: str) -> None:
    assert share(program) == 0.0


@pytest.mark.parametrize("program", ["while True: pass", "def add(a, b):\n    while True: pass"])
def test_a_program_that_hangs_is_wrong_within_its_time(program: str) -> None:
    assert share(program, wall_seconds=0.7) == 0.0


@pytest.mark.parametrize(
    "program", ["print('3'); 1/0", "print('3')\nwhile True: pass", "print('3', end='4')"]
)
def test_a_wrong_ending_or_output_is_wrong(program: str) -> None:
    assert share(program, [{"input": "", "output": "3"}], wall_seconds=1.0) == 0.0


def test_the_share_of_tests_and_stopping_at_the_first_failure() -> None:
    program = "def add(a, b): return 3"
    assert share(program) == pytest.approx(1 / 3)
    assert share(program, ADD_TESTS[::-1], stop=True) == 0.0
    pairs = [{"input": "", "output": text} for text in ("4", "3")]
    assert share("print(3)", pairs) == 0.5
    assert share("print(3)", pairs, stop=True) == 0.0


def test_results_before_a_hang_count() -> None:
    program = "def add(a, b):\n    while a != 1: pass\n    return a + b"
    assert share(program, wall_seconds=2.0) == pytest.approx(1 / 3)


def test_tests_that_never_use_the_program_are_an_error() -> None:
    with pytest.raises(TaskError, match="without any use of the program"):
        share(ADD, ["def check(f):\n    assert f(1, 2) == 3"])


@pytest.mark.parametrize(
    "tests",
    ["", [], {}, ["assert ("], "def", [1], [{"input": "x"}], [{"input": 1, "output": "1"}],
     {"inputs": ["a"], "outputs": []}, ["assert 1", {"input": "", "output": ""}]],
)  # fmt: skip
def test_what_is_no_test_is_refused(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"tests|Python|input"):
        parse_tests(tests)


scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False), st.fractions(), st.decimals(allow_nan=False), st.dates(),
)  # fmt: skip
keys = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
values = st.recursive(
    keys,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(keys, inner) | st.sets(keys),
    max_leaves=8,
)


@settings(max_examples=50)
@given(values)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    peer = Peer(io.BytesIO(), io.BytesIO())
    arrived = peer.decode(json.loads(json.dumps(peer.encode(value))))
    assert arrived == value
    assert type(arrived) is type(value)


def test_a_handle_comes_back_as_the_object() -> None:
    here, there = (Peer(io.BytesIO(), io.BytesIO()) for _ in range(2))
    thing = object()
    handle = there.decode(here.encode(thing))
    assert isinstance(handle, Remote)
    assert here.decode(there.encode(handle)) is thing
    for forged in ({"type": "exec"}, {"yours": "thing"}, {"text": ["os.system", "true"]}, {"new": 1}):
        with pytest.raises((ValueError, KeyError, AttributeError)):
            here.decode(forged)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("```python\na\n```\n```\nb\n\nc\n```", "b\n\nc"),
        ("1. so:\n   ```py\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("```\na\n```\n```\ncut off", "a"),
        ("```\n\n```", None),
        ("`a` and ```b```", None),
    ],
)
def test_the_last_code_block_is_found(completion: str, answer: str | None) -> None:
    assert extract_answer("last_code_block", completion) == answer


def code_task(folder: Path, **more: Any) -> Any:
    path = folder / "code.jsonl"
    rows = [{"question": f"{i}: add", "tests": ADD_TESTS} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"kind": "jsonl", "path": str(path), "answer_field": "tests", "heldout_size": 1,
                "verifier": "python_tests", "answer_rule": "last_code_block"} | more  # fmt: skip
    return pickle.loads(pickle.dumps(load_task(table)))


@pytest.mark.parametrize(("partial_credit", "total"), [(False, 0.0), (True, 1 / 3)])
def test_a_task_of_programs(tmp_path: Path, partial_credit: bool, total: float) -> None:
    task = code_task(tmp_path, partial_credit=partial_credit, sandbox={"cpu_seconds": 2, "memory_mb": 128})
    prompt = task.prompt("train", 0)
    right = task.score(prompt, f"First:\n```\nno\n```\nthen\n```python\n{ADD}```", "stop")
    assert (right.total, right.parts["correct"]) == (1.0, 1.0)
    partly = task.score(prompt, "```py\ndef add(a, b): return 3\n```", "stop")
    assert partly.total == pytest.approx(total)
    assert partly.parts["correct"] == 0.0
    none = task.score(prompt, ADD, "stop")
    assert (none.total, none.parts["answered"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"question": "q", "tests": ["assert ("]}, {}, "line 4: 'tests': a test is not Python"),
        ({"question": "q", "tests": []}, {}, "line 4: 'tests': no tests"),
        ({"question": "q"}, {}, "line 4: no text or number in 'tests'"),
        ({}, {"sandbox": {"cpu_second": 1}}, "task.sandbox.cpu_second is unknown"),
        ({}, {"sandbox": {"memory_mb": 1}}, "task.sandbox.memory_mb"),
    ],
)
def test_wrong_rows_and_settings_are_named(
    tmp_path: Path, row: dict[str, Any], more: Any, message: str
) -> None:
    task = {"kind": "jsonl", "path": str(tmp_path / "code.jsonl"), "answer_field": "tests", "heldout_size": 1,
            "verifier": "python_tests"} | more  # fmt: skip
    code_task(tmp_path)
    with open(tmp_path / "code.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(TaskError) as caught:
        load_task(task)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SOLUTIONS = {
    "is_palindrome": "def is_palindrome(t):\n    t = ''.join(filter(str.isalnum, t.lower()))\n"
    "    return t == t[::-1]",
    "roman": "def roman(n):\n    text = ''\n"
    "    for value, sign in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),\n"
    "        'M CM D CD C XC L XL X IX V IV I'.split()):\n        text += n // value * sign\n        n %= value\n"
    "    return text",
    "running_sum": "from itertools import accumulate\ndef running_sum(n): return list(accumulate(n))",
    "most_common": "def most_common(w): return min(w, key=lambda one: (-w.count(one), one))",
    "gcd_of": "import math\ndef gcd_of(n): return math.gcd(*n)",
    "flatten": "def flatten(x): return [v for i in x for v in flatten(i)] if isinstance(x, list) else [x]",
    "safe_divide": "def safe_divide(a, b):\n    if b == 0: raise ValueError\n    return a / b",
    "rotate": "def rotate(x, k):\n    for _ in range(k if x else 0): x.insert(0, x.pop())",
    "prints their sum": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "reverse order": "print(*input().split()[::-1])",
}


def test_the_problems_of_the_example_can_be_solved() -> None:
    lines = (Path(__file__).parents[2] / "examples" / "code.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len(SOLUTIONS)
    for words, program in SOLUTIONS.items():
        [tests] = [row["tests"] for row in rows if words in row["question"]]
        assert share(program, tests) == 1.0, words
