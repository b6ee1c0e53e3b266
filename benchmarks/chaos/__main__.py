"""python -m benchmarks.chaos [--kills 200] [--engine transformers|vllm] [--seed 0]

Proxy, learner and rollout workers as processes, an S3 server, a relay between them that loses, refuses, cuts and
delays a few requests in a hundred, and random SIGKILL, SIGTERM and SIGSTOP to all roles. Then the bucket is
audited, the run trained again from its batches and compared byte for byte, and its reward held against two
undisturbed runs of the same configuration and seed.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.s3 import CREDENTIALS, moto_server

from benchmarks.chaos.forked_roles import imported
from benchmarks.chaos.plan import draw
from benchmarks.chaos.runs import Result, Setting, heldout, replay, run
from benchmarks.chaos.store_faults import StoreFaults
from benchmarks.live import live
from bucketrl.jobs import benchmark_record

FAULTY = 0.04
"""Part of the requests to the store that go wrong."""
UNDISTURBED = 2
LEAST_STEPS = 30
RESULTS = Path(__file__).parents[1] / "results"


def figures(
    chaos: Result, calm: Sequence[Result], faults: StoreFaults, *, same_bytes: bool
) -> dict[str, object]:
    """Of the record."""
    strikes = chaos.outcome.strikes
    rewards = [result.reward for result in calm]
    difference = chaos.reward - statistics.fmean(rewards)
    error = (chaos.standard_error**2 + sum(r.standard_error**2 for r in calm) / len(calm) ** 2) ** 0.5
    spread = max(rewards) - min(rewards)
    return {
        "kills": strikes.total(),
        "audit_violations": len(chaos.audit.violations),
        "steps": chaos.steps,
        "kills_by_signal": dict(_tally((kind, n) for (_, kind), n in strikes.items())),
        "kills_by_role": dict(_tally((role, n) for (role, _), n in strikes.items())),
        "restarts": chaos.outcome.restarts,
        "exits": {f"{role} {code}": n for (role, code), n in sorted(chaos.outcome.exits.items())},
        "crashes": chaos.outcome.crashes,
        "second_learners": chaos.outcome.second_learners,
        "fenced": chaos.outcome.fenced,
        "overdue_after_sigterm": chaos.outcome.overdue,
        "log_records": chaos.audit.records,
        "log_records_changed": len(chaos.log_changed),
        "replay_same_bytes": same_bytes,
        "trained": chaos.audit.trained,
        "skipped": chaos.audit.skipped,
        "stale": chaos.stale,
        "duplicates": chaos.audit.duplicates,
        "quarantined": chaos.audit.quarantined,
        "partials": chaos.audit.partials,
        "reward_last10": round(chaos.reward, 4),
        "reward_last10_undisturbed": [round(reward, 4) for reward in rewards],
        "reward_difference": round(difference, 4),
        "reward_spread_undisturbed": round(spread, 4),
        "reward_standard_error": round(error, 4),
        "within_noise": abs(difference) <= max(spread, 2 * error),
        "seconds": round(chaos.outcome.seconds),
        "seconds_undisturbed": [round(result.outcome.seconds) for result in calm],
        "store_requests": faults.requests,
        "store_faults": dict(faults.injected),
    }


def _tally(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, number in pairs:
        total[name] += number
    return total


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ.update(CREDENTIALS)
    steps = max(LEAST_STEPS, options.kills // 2)
    workers = 1 if options.engine == "vllm" else 2
    with tempfile.TemporaryDirectory(prefix="bucketrl-chaos-") as folder, moto_server() as server, imported():
        setting = Setting(options.engine, workers, steps, options.seed, Path(folder))
        calm = [
            run(setting, f"undisturbed-{n + 1}", server, (), say=live(f"undisturbed {n + 1}"))
            for n in range(UNDISTURBED)
        ]
        faults = StoreFaults(options.seed, FAULTY)
        strikes = draw(options.seed, kills=options.kills, steps=steps, workers=workers)
        chaos = run(setting, "chaos", server, strikes, faults=faults, say=live("chaos"))
        same_bytes = replay(setting, "chaos", server)
        names = ["chaos", *(f"undisturbed-{n + 1}" for n in range(UNDISTURBED))]
        accuracies = [heldout(name, server) for name in names]
    found = figures(chaos, calm, faults, same_bytes=same_bytes)
    found |= {"heldout": accuracies[0], "heldout_undisturbed": accuracies[1:]}
    for key, value in found.items():
        print(f"{key:28} {value}")
    for violation in chaos.audit.violations:
        print(f"VIOLATION of invariant {violation.invariant}: {violation.key}: {violation.message}")
    path = benchmark_record.write(
        "chaos" if options.engine == "transformers" else "chaos_vllm",
        found,
        command="python -m benchmarks.chaos "
        f"--kills {options.kills} --engine {options.engine} --seed {options.seed}",
        seeds=[options.seed],
        notes=NOTES[options.engine],
        folder=RESULTS,
    )
    print(f"record: {path}")
    sound = same_bytes and not chaos.audit.violations and not chaos.log_changed
    return 0 if sound and found["within_noise"] else 1


_COMMON = (
    "Signals go to the whole process group of a role, which is started again with the same command as soon as it "
    "has ended. A store fault hits 4 in 100 requests. within_noise: reward_difference (against the mean of the two "
    "undisturbed runs) is no larger than their spread or two standard errors of the difference, taken from the ten "
    "steps. exits: by role and exit code (-9 SIGKILL, 0 after SIGTERM or at the end, 3 fenced). "
)
NOTES = {
    "transformers": _COMMON
    + "Roles are forked from a process that has their imports done, so that signals find them at work.",
    "vllm": _COMMON + "Roles are started as a user starts them; one rollout worker.",
}


if __name__ == "__main__":
    sys.exit(main())
