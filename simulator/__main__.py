"""python -m bucketrl.simulator: plays seeds, prints what fails; exit code 1 if anything does.

--seeds 20000            seeds 0 to 19999 (`--first` to begin elsewhere)
--seed 17                one seed, with its history
--planted                looks for each planted fault until a seed shows it
--planted base_served    that one, with its shortest failing history
"""

import argparse
import sys

from bucketrl.simulator.campaign import Campaign, Progress, shortest
from bucketrl.simulator.planted import PLANTED
from bucketrl.simulator.scenario import scenario
from bucketrl.simulator.world import Outcome, simulate

PLANTED_LIMIT = 2000
"""Seeds in which a planted fault has to show."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bucketrl.simulator", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=500, metavar="N", help="how many (default 500)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first one (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=None, metavar="N", help="processes (default: one per core)"
    )
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="one seed, with its history")
    parser.add_argument("--planted", nargs="?", const="all", choices=["all", *PLANTED], help="plant faults")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        planted = None if arguments.planted == "all" else arguments.planted
        return _show(simulate(scenario(arguments.seed), planted))
    with Campaign(arguments.jobs) as campaign:
        if arguments.planted:
            names = list(PLANTED) if arguments.planted == "all" else [arguments.planted]
            return _planted(campaign, names, shown=len(names) == 1)
        return _seeds(campaign, range(arguments.first, arguments.first + arguments.seeds))


def _seeds(campaign: Campaign, seeds: range) -> int:
    progress = Progress("simulation", len(seeds), _status)
    failed = []
    for verdict in campaign.verdicts(seeds):
        progress.add(verdict)
        if verdict.violations:
            failed.append(verdict.seed)
            _line(f"seed {verdict.seed}: {verdict.violations[0]}")
    _line(f"{len(seeds)} seeds, {len(failed)} with a violated invariant")
    if failed:
        _shorten(min(failed), None)
    return 1 if failed else 0


def _planted(campaign: Campaign, names: list[str], *, shown: bool) -> int:
    missed = 0
    for name in names:
        _status(f"{name}: looking")
        verdict = campaign.search(name, PLANTED_LIMIT)
        if verdict is None:
            missed += 1
            _line(f"{name:32} not found in {PLANTED_LIMIT} seeds")
        else:
            _line(f"{name:32} seed {verdict.seed:4}  {verdict.violations[0][:160]}")
            if shown:
                _shorten(verdict.seed, name)
    return 1 if missed else 0


def _shorten(seed: int, planted: str | None) -> None:
    _show(shortest(seed, planted, lambda faults: _status(f"seed {seed}: trying {faults} faults")))


def _show(outcome: Outcome) -> int:
    _line(f"seed {outcome.scenario.seed}: {len(outcome.scenario.faults)} faults, {outcome.seconds:.0f} s")
    for fault in outcome.scenario.faults:
        _line(f"  {fault}")
    for at, who, what in outcome.history:
        _line(f"{at:10.3f}  {who:14} {what}")
    for violation in outcome.violations:
        _line(f"violated: {violation}")
    return 1 if outcome.violations else 0


def _status(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<100}", end="", file=sys.stderr, flush=True)


def _line(text: str) -> None:
    if sys.stderr.isatty():
        print("\r" + " " * 100 + "\r", end="", file=sys.stderr)
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
