# SPDX-License-Identifier: Apache-2.0
"""Run the literal model's rules from a seed:

    python -m tests.unittest.kv_cache_manager_v2.drive --steps N --seed S

Each episode takes the next variant, runs a few hundred random rules, one in eight of them with an injected
failure, checks everything after each, and ends with all memory free.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable

from tests.unittest.kv_cache_manager_v2.literal_model import VARIANTS, Machine

EPISODE_STEPS = 400


def random_rule(machine: Machine, rng: random.Random) -> Callable[[], None]:
    """Return the next rule with its arguments drawn."""
    pick, small = rng.randrange(1000), rng.randrange(4)
    tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
    rules: list[tuple[int, Callable[[], None]]] = [
        (4, lambda: machine.create(None if small else "other", tokens)),
        (16, lambda: machine.fork(pick, rng.randrange(60), tokens[: small + 1])),
        (18, lambda: machine.resume(pick)),
        (30, lambda: machine.compute(pick, rng.randrange(1, 12), small)),
        (4, lambda: machine.reserve(pick, rng.randrange(1, 12))),
        (16, lambda: machine.commit(pick, rng.random() < 0.2)),
        (2, lambda: machine.stop_committing(pick)),
        (6, lambda: machine.suspend(pick)),
        (3, lambda: machine.prefetch(pick, small)),
        (8, lambda: machine.close(pick)),
        (1, lambda: machine.drop_committed(pick)),
        (1, machine.rebalance),
        (1, lambda: machine.resize_tier(small, rng.randrange(4, 48))),
        (1, machine.clear if rng.random() < 0.1 else lambda: machine.suspend(pick)),
    ]
    weights = [weight for weight, _ in rules]
    return rng.choices([rule for _, rule in rules], weights)[0]


def run(num_steps: int, seed: int, episode_steps: int = EPISODE_STEPS) -> Counter[str]:
    """Run `num_steps` rules; returns how often the interesting things happened."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    done = 0
    while done < num_steps:
        machine = Machine(VARIANTS[counts["episodes"] % len(VARIANTS)])
        for _ in range(min(episode_steps, num_steps - done)):
            rule = random_rule(machine, rng)
            if rng.random() < 0.125:
                machine.with_fault(rng.randrange(6), rule)
            else:
                rule()
            machine.check()
            done += 1
        counts.update(machine.counts)
        for totals in machine.manager.get_total_stats():
            counts["dropped"] += totals.dropped_blocks
            counts["onboarded"] += totals.onboard_bytes > 0
            counts["offloaded"] += totals.offload_bytes > 0
        machine.end()
        counts["episodes"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    start = time.monotonic()
    counts = run(options.steps, options.seed)
    seconds = time.monotonic() - start
    print(f"{options.steps} steps, seed {options.seed}, {seconds:.0f} s: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
