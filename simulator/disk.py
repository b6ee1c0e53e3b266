"""The bucket of a simulation: what is really stored, and what each process sees of it."""

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bucketrl.bucket import keys
from bucketrl.bucket.errors import AlreadyExists, NotFound, StoreError, Unsupported
from bucketrl.bucket.records import StepRecord, decode_log
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.simulator.kernel import Crash, Kernel, Process
from bucketrl.simulator.scenario import Fault, Scenario

T = TypeVar("T")

DURABLE = True
"""Whether a write that was acknowledged outlives the machine of its writer. False is a planted fault."""
UNSYNCED_S = 2.0
WRITES = ("put", "create", "put_file", "delete")
STORE_TIMEOUT_S = 8.0
"""A process that is cut off from the bucket gives an operation up after that."""


class Disk:
    """The objects. Every key's bytes are remembered for ever, for the judge."""

    def __init__(self, kernel: Kernel, scenario: Scenario) -> None:
        self._kernel = kernel
        self._lag = random.Random(f"lag/{scenario.seed}")
        self._scenario = scenario
        self.objects: dict[str, bytes] = {}
        self.archive: dict[str, list[bytes]] = {}
        """Key -> every content that it ever had, oldest first."""
        self.written_at: dict[str, float] = {}
        """Key -> when it appeared first."""
        self._listed_from: dict[str, float] = {}
        self.newest: StepRecord | None = None
        """The newest commit."""
        self._unsynced: list[tuple[float, Process, str]] = []

    def put(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            self._listed_from[key] = self._kernel.now + self._lag.uniform(0.0, self._scenario.list_lag_s)
        self.objects[key] = data
        self.written_at.setdefault(key, self._kernel.now)
        if key.startswith(keys.LOG_PREFIX):
            record = decode_log(data)
            self.newest = record if isinstance(record, StepRecord) else self.newest
        versions = self.archive.setdefault(key, [])
        if data not in versions:
            versions.append(data)

    def wrote(self, process: Process, key: str) -> None:
        if not DURABLE:
            self._unsynced.append((self._kernel.now, process, key))

    def machine_died(self, process: Process) -> None:
        for at, writer, key in self._unsynced:
            if writer is process and self._kernel.now - at < UNSYNCED_S:
                self.objects.pop(key, None)

    def create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise AlreadyExists(key)
        self.put(key, data)

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise NotFound(key) from None

    def list(self, prefix: str, start_after: str, *, all_of_it: bool = False) -> list[ObjectInfo]:
        return [
            ObjectInfo(key, len(data))
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
            and key > start_after
            and (all_of_it or self._listed_from[key] <= self._kernel.now)
        ]

    def delete(self, doomed: Iterable[str]) -> None:
        for key in doomed:
            self.objects.pop(key, None)


class SimulatedStore:
    """Implements `Store` for one process: each operation takes time, and may fail in every way."""

    url = "simulated://bucket"

    def __init__(
        self, kernel: Kernel, disk: Disk, process: Process, faults: "OperationFaults", tier: Tier
    ) -> None:
        self.tier = tier
        self._kernel = kernel
        self._disk = disk
        self._process = process
        self._faults = faults
        self._rng = random.Random(f"store/{faults.scenario.seed}/{process.name}")
        self.cut_off = False
        """By a partition."""

    def get(self, key: str) -> bytes:
        return self._operate("get", key, lambda: self._disk.get(key))

    def put(self, key: str, data: bytes) -> None:
        self._operate("put", key, lambda: self._disk.put(key, data), data)

    def create(self, key: str, data: bytes) -> None:
        if self.tier < Tier.CREATE:
            raise Unsupported(f"{self.url}: no create")
        self._operate("create", key, lambda: self._disk.create(key, data), data)

    def put_file(self, key: str, path: Path) -> None:
        data = path.read_bytes()
        self._operate("put_file", key, lambda: self._disk.put(key, data), data)

    def get_file(self, key: str, path: Path) -> None:
        path.write_bytes(self._operate("get_file", key, lambda: self._disk.get(key)))

    def size(self, key: str) -> int:
        return self._operate("size", key, lambda: len(self._disk.get(key)))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        return iter(self._operate("list", prefix, lambda: self._disk.list(prefix, start_after)))

    def delete(self, keys: Iterable[str]) -> None:
        doomed = list(keys)
        self._operate("delete", f"{len(doomed)} from {doomed[:1]}", lambda: self._disk.delete(doomed))

    def sweep(self, older_than_s: float) -> int:
        return 0

    def _operate(self, kind: str, key: str, apply: Callable[[], T], data: bytes | None = None) -> T:
        if not self._process.alive:
            raise Crash
        if self._kernel.process is None:
            return apply()  # a pool of real threads that a simulated one waits for: it reads, in no time
        fault = self._faults.take(self._process.role, kind in WRITES)
        kernel, who = self._kernel, self._process.name
        kernel.sleep(self._latency() + (fault.seconds if fault and fault.kind == "slow" else 0.0))
        if self.cut_off:
            kernel.sleep(STORE_TIMEOUT_S)
            raise StoreError(f"{key}: timeout")
        what = f"{kind} {key}"
        if fault is not None:
            kernel.note(who, f"{what}: {fault.kind}")
            if fault.kind == "crash_before":
                self._die()
            if fault.kind == "fail":
                raise StoreError(f"{key}: 503")
            if fault.kind == "crash_late":
                kernel.at(kernel.now + fault.seconds, lambda: self._land(what, apply))
                self._die()
            if fault.kind == "corrupt_write" and data is not None and _may_be_torn(key):
                self._disk.put(key, data[: len(data) // 2])
                return None  # type: ignore[return-value]
        try:
            result = apply()
        except (NotFound, AlreadyExists) as error:
            kernel.note(who, f"{what}: {type(error).__name__}")
            kernel.sleep(self._latency())
            raise
        kernel.note(who, what)
        if kind in WRITES:
            self._disk.wrote(self._process, key)
        if fault is not None:
            if fault.kind == "crash_after":
                self._die()
            if fault.kind == "lost_reply":
                if kind == "create" and fault.seconds < 1.0:
                    raise AlreadyExists(key)  # what a client that repeats by itself comes to see
                raise StoreError(f"{key}: connection lost")
            if fault.kind == "corrupt_read" and isinstance(result, bytes):
                result = _damaged(result, fault)  # type: ignore[assignment]
        kernel.sleep(self._latency())
        return result

    def _land(self, what: str, apply: Callable[[], Any]) -> None:
        try:
            apply()
        except AlreadyExists:
            return
        self._kernel.note("store", f"{what}: lands late")

    def _die(self) -> None:
        self._kernel.kill(self._process)
        raise Crash

    def _latency(self) -> float:
        return self._rng.uniform(0.002, 0.03) if self._rng.random() < 0.97 else self._rng.uniform(0.3, 2.0)


class OperationFaults:
    """Which operation of a role is hit by what; counted over all of its incarnations."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._planned = {(f.role, f.on_write, f.nth): f for f in scenario.faults if f.on_operation}
        self._counts: dict[tuple[str, bool], int] = {}

    def take(self, role: str, write: bool) -> Fault | None:
        count = self._counts.get((role, write), 0)
        self._counts[role, write] = count + 1
        return self._planned.get((role, write, count))


def _may_be_torn(key: str) -> bool:
    """Objects that no commit names yet and whose loss the protocol has to survive."""
    return key.startswith((keys.TRAJECTORY_PREFIX, "partial/"))


def _damaged(data: bytes, fault: Fault) -> bytes:
    if fault.seconds < 1.0 or not data:
        return data[: len(data) // 2]
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
