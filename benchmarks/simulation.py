"""python -m benchmarks.simulation [SEEDS]: invariants under injected faults, and planted faults found.

Hours on 2 cores; the seeds, their faults and their histories are the same everywhere.
"""

import argparse
import sys
from pathlib import Path

from bucketrl.jobs import benchmark_record
from bucketrl.simulator.campaign import Campaign, Progress
from bucketrl.simulator.planted import PLANTED

PLANTED_LIMIT = 2000


def main(seeds: int) -> int:
    progress = Progress("simulation", seeds, lambda text: print(f"\r{text:<90}", end="", flush=True))
    failed, faults, seconds = [], 0, 0.0
    with Campaign() as campaign:
        for verdict in campaign.verdicts(range(seeds)):
            progress.add(verdict)
            faults += verdict.faults
            seconds += verdict.seconds
            if verdict.violations:
                failed.append(verdict.seed)
        found = {name: campaign.search(name, PLANTED_LIMIT) for name in PLANTED}
    print()
    for name, verdict in found.items():
        print(f"{name:32} {'not found' if verdict is None else f'seed {verdict.seed}'}")
    print(f"{seeds} seeds, {len(failed)} with a violated invariant {failed[:5]}")
    figures = {
        "seeds": seeds,
        "violations": len(failed),
        "planted": len(PLANTED),
        "planted_found": sum(verdict is not None for verdict in found.values()),
        "faults_injected": faults,
        "virtual_hours": round(seconds / 3600, 1),
    }
    figures |= {f"seed_of_{name}": verdict.seed for name, verdict in found.items() if verdict}
    path = benchmark_record.write(
        "simulation",
        figures,
        command=f"python -m benchmarks.simulation {seeds}",
        seeds=[0, seeds - 1],
        notes="seeds: first and last; seed_of_…: the one that was found to show a planted fault",
        folder=Path(__file__).parent / "results",
    )
    print(f"record: {path}")
    return 1 if failed or None in found.values() else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=20_000, help="default: %(default)s")
    sys.exit(main(parser.parse_args().seeds))
