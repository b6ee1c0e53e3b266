"""python -m benchmarks.protocol: some 3 minutes on 2 cores; `--quick`: all of it small, nothing recorded."""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.budget import WORKERS, five_minutes

from benchmarks.protocol import steps, stores, workers
from benchmarks.protocol.costs import Cost, Spread
from bucketrl.bucket.retention import DEFAULT_KEEP
from bucketrl.jobs import benchmark_record

LENGTHS = (10, 100, 1_000, 10_000)
FLEETS = (1, 10, 100, 1_000)
STEPS_PER_PASS = DEFAULT_KEEP // 2
"""Steps from one collection to the next."""
GROUPS_PER_STEP = 64
"""Of the run whose API requests are counted."""
MEMORY = Path("/dev/shm")


def main(quick: bool) -> int:
    gc.collect()
    gc.freeze()  # what all imports together hold is no role's own
    try:
        figures = _figures(quick)
    finally:
        gc.unfreeze()
    if quick:
        return 0
    path = benchmark_record.write(
        "protocol",
        figures,
        command="python -m benchmarks.protocol",
        seeds=[1],
        notes="CPU times are of one process, all threads; [median, lowest, highest] over rounds in which stores, "
        "lengths and fleets took turns. step_cost: learner, proxy, worker and a collection every 32 steps, with 8 "
        "small groups a step in a local folder that keeps 64 steps. worker_cost: of a worker's request to the "
        "proxy by HTTP. S3 servers run on the same cores; the Hugging Face store is a stand-in in memory. "
        "Stores are timed by the clock: stores_load_average above 2 means that others had a share of the cores.",
        folder=Path(__file__).parents[1] / "results",
    )
    print(f"record: {path}")
    return 0


def _figures(quick: bool) -> dict[str, Any]:
    # The growth of a run is no question to the disk; stores are measured on it.
    fast = MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="bucketrl-benchmark-") as disk,
        tempfile.TemporaryDirectory(prefix="bucketrl-benchmark-", dir=fast) as memory,
    ):
        figures = _steps(Path(memory), quick) | _workers(quick) | _stores(Path(disk), quick)
        return figures if quick else figures | _requests(Path(memory) / "budget")


def _say(text: str) -> None:
    print(f"\r{text:<90}", end="", flush=True)


def _title(text: str) -> None:
    print(f"\r{text:<90}")


def _steps(folder: Path, quick: bool) -> dict[str, Any]:
    lengths, rounds = (LENGTHS[:2], 2) if quick else (LENGTHS, 15)
    costs = steps.measure(folder, lengths, keep=DEFAULT_KEEP, rounds=rounds, progress=_say)
    cpu = {length: steps.medians(each, _cpu_ms) for length, each in costs.items()}
    requests = {length: steps.medians(each, _requests_of) for length, each in costs.items()}
    _title("one more step: CPU ms (requests)")
    print(f"{'steps before':14}" + "".join(f"{role:>18}" for role in steps.ROLES))
    for length in lengths:
        cells = [f"{cpu[length][role]:.2f} ({requests[length][role]:.0f})" for role in steps.ROLES]
        print(f"{length:<14,}" + "".join(f"{cell:>18}" for cell in cells))
    whole = {length: Spread.of([_step_ms(one) for one in each]) for length, each in costs.items()}
    for length in lengths:
        print(f"a step after {length:,}: {whole[length].median:.2f} ms")
    return {
        "step_cost_10_to_10000": round(whole[lengths[-1]].median / whole[lengths[0]].median, 2),
        "step_cpu_ms": {str(length): spread.rounded(2) for length, spread in whole.items()},
        "step_cpu_ms_by_role": _rounded(cpu),
        "step_requests_by_role": _rounded(requests),
    }


def _cpu_ms(cost: Cost) -> float:
    return cost.cpu_s * 1e3


def _requests_of(cost: Cost) -> float:
    return float(cost.total_requests)


def _step_ms(costs: dict[str, Cost]) -> float:
    """Of all roles together; a collection is shared by the steps until the next one."""
    each = {role: _cpu_ms(costs[role]) for role in steps.PER_STEP}
    return sum(each.values()) - each["collector"] * (1 - 1 / STEPS_PER_PASS)


def _rounded(table: dict[int, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {str(size): {name: round(x, 3) for name, x in row.items()} for size, row in table.items()}


def _workers(quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    fleets, rounds, groups = (FLEETS[:2], 2, 20) if quick else (FLEETS, 5, 1000)
    for name, http in (("core", False), ("worker", True)):
        costs = asyncio.run(workers.measure(fleets, http=http, groups=groups, rounds=rounds, progress=_say))
        micros = {
            size: {kind: Spread.of([row[kind] * 1e6 for row in rows]) for kind in rows[0]}
            for size, rows in costs.items()
        }
        _title(f"a worker's request to the proxy, {'by HTTP' if http else 'without HTTP'}: CPU microseconds")
        kinds = list(micros[fleets[0]])
        print(f"{'workers':14}" + "".join(f"{kind:>12}" for kind in kinds))
        for size in fleets:
            print(f"{size:<14,}" + "".join(f"{micros[size][kind].median:12.1f}" for kind in kinds))
        small, large = micros[fleets[0]], micros[fleets[-1]]
        for kind, figure in (
            ("request", f"{name}_cost_1_to_1000"),
            ("group", f"{name}_group_cost_1_to_1000"),
        ):
            figures[figure] = round(large[kind].median / small[kind].median, 2)
        figures[f"{name}_cpu_us"] = {
            str(size): {kind: spread.rounded(1) for kind, spread in row.items()}
            for size, row in micros.items()
        }
    return figures


def _stores(folder: Path, quick: bool) -> dict[str, Any]:
    sizes, rounds = (stores.Sizes(2, 1, 1_000_000), 1) if quick else (stores.Sizes(), 5)
    rates = stores.measure(folder, sizes, rounds=rounds, servers=not quick, progress=_say)
    _title("stores: per second (medians)")
    names = ("commits_per_s", "group_puts_per_s", "group_gets_per_s", "put_mb_per_s", "get_mb_per_s")
    print(f"{'':14}" + "".join(f"{name:>18}" for name in names))
    table: dict[str, dict[str, list[float]]] = {}
    for store, rate in rates.items():
        measured = {name: Spread.of(getattr(rate, name)) for name in names if getattr(rate, name)}
        cells = [f"{measured[name].median:.1f}" if name in measured else "-" for name in names]
        print(f"{store:14}" + "".join(f"{cell:>18}" for cell in cells))
        table[store] = {name: spread.rounded(1) for name, spread in measured.items()}
    load = round(os.getloadavg()[0], 1)
    return {
        "stores": table,
        "stores_load_average": load,
        "tokens_a_group": stores.COMPLETIONS * stores.TOKENS,
    }


def _requests(folder: Path) -> dict[str, Any]:
    _say(f"five minutes of {WORKERS} workers")
    folder.mkdir()
    spent, taken = five_minutes(folder, GROUPS_PER_STEP)
    _title(
        f"{WORKERS} workers, {taken} steps of {GROUPS_PER_STEP} groups, 5 minutes: {spent.total()} API requests"
    )
    return {"api_calls_5min_64_workers": spent.total(), "api_calls_groups_a_step": GROUPS_PER_STEP}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.protocol", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, no servers, no record")
    sys.exit(main(parser.parse_args().quick))
