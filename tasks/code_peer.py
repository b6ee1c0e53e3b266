"""Tests of a program that cannot reach them: program and tests run in two sandboxes that exchange plain values.

This file's text runs as `__main__` in both (`tasks.code_tests`), followed by a call of `serve` or of `judge`;
standard library only. The tests call the program's functions through `Remote` objects. Numbers, strings and
containers are copied; anything else stays where it is, and the other side gets a handle. So what a test compares
is a plain value of the test's own process, whatever the program has done to its own: `__eq__`, builtins,
`sys.modules`, `os._exit`.
"""

import ast
import builtins
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any, BinaryIO

CHANNEL_FD = 3
PLAIN_TEXT = {"fractions.Fraction", "decimal.Decimal", "datetime.date", "datetime.datetime"}
"""Values that are copied as their text."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "iter": iter,
    "next": next,
    "getattr": getattr,
    "setattr": setattr,
    "len": len,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "eq": operator.eq,
    "str": str,
    "repr": repr,
}
"""What one side may ask of an object of the other."""
OF_TESTS = {"call", "iter", "next"}
"""What the program may ask of an object that a test has passed to it, such as a callback."""


class Gone(ConnectionError):
    """The other side has ended."""


class Remote:
    """A handle of an object that stays on the other side."""

    __slots__ = ("_handle", "_peer")

    def __init__(self, peer: "Peer", handle: int | str) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __iter__(self) -> Any:
        return self._peer.ask("iter", self)

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __len__(self) -> int:
        return int(self._peer.ask("len", self))

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, key, value)

    def __eq__(self, other: object) -> bool:
        # Of two objects of the program it may say what it likes; against a plain value it has no say.
        return isinstance(other, Remote) and self._peer.ask("eq", self, other) is True

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))

    def __repr__(self) -> str:
        return str(self._peer.ask("repr", self))


class Peer:
    """One end of the channel. Either side may ask while it is asked (callbacks)."""

    def __init__(
        self, reader: BinaryIO, writer: BinaryIO, resolve: Callable[[str], Any] | None = None
    ) -> None:
        """`resolve` finds what has a name here; None on the side of the tests, where nothing has."""
        self._reader = reader
        self._writer = writer
        self._resolve = resolve
        self._kept: list[Any] = []
        self.asked = 0

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """What the other side answers. Raises what it raises, as the nearest built-in exception."""
        self.asked += 1
        self._send({"ask": operation, "arguments": [self.encode(one) for one in arguments],
                    "named": {name: self.encode(value) for name, value in named.items()}})  # fmt: skip
        answer = self._answers_until_mine()
        for index, value in answer.get("changed", {}).items():
            _overwrite(arguments[int(index)], self.decode(value))
        if "raised" in answer:
            name, message = answer["raised"]
            error = getattr(builtins, str(name), None)
            if isinstance(error, type) and issubclass(error, Exception):
                raise error(str(message))
            raise RuntimeError(str(message))
        return self.decode(answer["value"])

    def answer_for_ever(self) -> None:
        """Raises Gone when the other side has ended."""
        while True:
            self._answer(self._receive())

    def _answers_until_mine(self) -> dict[str, Any]:
        while "ask" in (message := self._receive()):
            self._answer(message)
        return message

    def _answer(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        try:
            if self._resolve is None and not (
                message["ask"] in OF_TESTS and "yours" in message["arguments"][0]
            ):
                raise PermissionError(f"a program may not ask a test for {message['ask']}")
            arguments = [self.decode(one) for one in message["arguments"]]
            named = {name: self.decode(value) for name, value in message["named"].items()}
            value = OPERATIONS[message["ask"]](*arguments, **named)
            answer["value"] = self.encode(value)
            # A function may change its arguments in place.
            now = {
                str(index): self.encode(one)
                for index, one in enumerate(arguments)
                if isinstance(one, list | dict | set)
            }
            answer["changed"] = {
                index: one for index, one in now.items() if one != message["arguments"][int(index)]
            }
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked; SystemExit too
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            answer = {"raised": [names[0], str(error)[:1000]]}
        self._send(answer)

    def encode(self, value: Any) -> Any:
        """JSON for `value`. Subclasses become their base; what is not plain becomes a handle."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(one) for one in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(one)] for key, one in value.items()]}
        if isinstance(value, bytes | bytearray):
            return {type(value).__name__: value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, Remote):
            return {"yours": value._handle}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in PLAIN_TEXT:
            return {"text": [name, str(value)]}
        if isinstance(value, type):
            name = value.__name__
            if vars(builtins).get(name) is value:
                return {"type": name}
        self._kept.append(value)
        return {"mine": len(self._kept) - 1}

    def decode(self, encoded: Any) -> Any:
        if not isinstance(encoded, dict):
            return encoded
        [(kind, content)] = encoded.items()
        match kind:
            case "list" | "tuple" | "set" | "frozenset":
                return getattr(builtins, kind)(self.decode(one) for one in content)
            case "dict":
                return {self.decode(key): self.decode(value) for key, value in content}
            case "bytes" | "bytearray":
                return getattr(builtins, kind).fromhex(content)
            case "complex" | "range":
                return getattr(builtins, kind)(*content)
            case "text" if content[0] in PLAIN_TEXT:
                module, _, name = content[0].partition(".")
                plain = getattr(importlib.import_module(module), name)
                return getattr(plain, "fromisoformat", plain)(content[1])
            case "type" if isinstance(found := getattr(builtins, content), type):
                return found
            case "mine":
                return Remote(self, content)
            case "yours":
                return self._own(content)
        raise ValueError(f"no value: {kind}")

    def _own(self, handle: int | str) -> Any:
        if isinstance(handle, str) and self._resolve is not None:
            return self._resolve(handle)
        return self._kept[int(handle)]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except OSError as error:
            raise Gone from error

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._reader.readline()
        except OSError as error:
            raise Gone from error
        if not line.endswith(b"\n"):
            raise Gone
        message: dict[str, Any] = json.loads(line)
        return message


def _overwrite(target: Any, value: Any) -> None:
    """Makes a list, dict or set that was copied equal to its copy."""
    if isinstance(target, list):
        target[:] = value
    elif isinstance(target, dict | set):
        target.clear()
        target.update(value)


def _channel() -> tuple[BinaryIO, BinaryIO]:
    return os.fdopen(CHANNEL_FD, "rb"), os.fdopen(CHANNEL_FD, "wb", closefd=False)


def serve(program: str) -> None:
    """The program's side: runs it as the module `solution`, then answers for what it has defined."""
    sys.set_int_max_str_digits(0)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(program, "program.py", "exec"), module.__dict__)

    def resolve(name: str) -> Any:
        if name not in module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return module.__dict__[name]

    try:
        Peer(*_channel(), resolve).answer_for_ever()
    except Gone:
        os._exit(0)


def judge(tests: list[str], stop_at_failure: bool) -> None:
    """The tests' side. Prints 1 or 0 for each, then how often the program was asked for something."""
    sys.set_int_max_str_digits(0)
    report = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what tests print is for nobody
    peer = Peer(*_channel())
    solution = types.ModuleType("solution")
    solution.__dict__["__getattr__"] = lambda name: Remote(peer, name)
    sys.modules["solution"] = solution
    namespace: dict[str, Any] = {"__name__": "tests"}
    for node in (node for test in tests for node in ast.walk(ast.parse(test))):
        # What a test imports or defines takes the name back; built-in names are never the program's.
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
            namespace[node.id] = Remote(peer, node.id)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, f"test {number}", "exec"), namespace)
        except BaseException:  # noqa: BLE001 - whatever it is, the test has not passed
            report.write("0")
            if stop_at_failure:
                break
        else:
            report.write("1")
        report.flush()
    report.write(f" {peer.asked}")
    report.flush()
    os._exit(0)
