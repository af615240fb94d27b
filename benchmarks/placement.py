"""What a choice costs: microseconds of CPU with 100 replicas and 10,000 adapters.

Each row is the best of some rounds, of each the mean over many different requests, so that
nothing is asked for twice in a row. ``orders cached`` is the running state: the replicas report
many times a second, which makes a new view of the fleet each time, and seldom come or go, which
alone costs the orders anew.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from mural_router.placement import (
    Fleet,
    LoadLedger,
    PlacementRequest,
    Replica,
    Residency,
    choose,
    explain,
)

ROUNDS = 9


def fleet_of(replicas: int, adapters: Sequence[str], rng: random.Random) -> Fleet:
    """Each adapter in memory at its first two homes, a third of the replicas over the bound.

    Ranks are mixed, and what is wanted fills some of the replicas' memory and not others'.
    """
    bare = Fleet(tuple(Replica(f"mural-{i:04}") for i in range(replicas)))
    held: list[dict[str, Residency]] = [{} for _ in range(replicas)]
    for adapter in adapters:
        for place in bare.members.order(adapter)[:2]:
            rank = rng.choice([8, 8, 16, 64])
            held[place][adapter] = Residency(
                "host",
                rank=rank,
                bytes=rank * (512 << 10),
                requests=rng.choice([0, 0, 0, 1]),
                load=rng.random(),
            )
    return Fleet(
        tuple(
            replace(
                replica,
                slots=16,
                host_bytes=2500 << 20,
                max_lora_rank=64,
                max_num_seqs=64,
                running=rng.randrange(16, 46),
                tokens_per_s=300.0,
                adapters=held[i],
            )
            for i, replica in enumerate(bare.replicas)
        )
    )


def microseconds(work: Callable[[], int]) -> float:
    """CPU a unit of work, which `work` counts: the best of some rounds, least disturbed."""
    rounds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        done = work()
        rounds.append((time.process_time() - begun) / done * 1e6)
    return min(rounds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--adapters", type=int, default=10_000)
    options = parser.parse_args()
    rng = random.Random(1)
    adapters = [f"tenant-{i % 500}/adapter-{i}:v1" for i in range(options.adapters)]
    fleet = fleet_of(options.replicas, adapters, rng)
    ledger = LoadLedger()
    ledger.observe(fleet)

    def choices(requests: Sequence[PlacementRequest], view: Fleet, k: int | None = None) -> int:
        for request in requests:
            choose(request, view, ledger.loads, declared=k)
        return len(requests)

    rng.shuffle(adapters)
    plain = [PlacementRequest(adapter) for adapter in adapters]
    grouped = [msgspec.structs.replace(request, prefix=rng.getrandbits(64)) for request in plain]
    base = [msgspec.structs.replace(request, adapter=None) for request in grouped]
    one_left = Fleet(fleet.replicas[1:])
    begun = time.process_time()
    choices(plain, one_left)
    new_orders = (time.process_time() - begun) / len(plain) * 1e6
    choices(base, fleet)
    rows = {
        "all orders new: a replica left": new_orders,
        "orders cached, view of the fleet new": microseconds(
            lambda: choices(plain, Fleet(fleet.replicas))
        ),
        "same view": microseconds(lambda: choices(plain, fleet)),
        "k = 3, by prefix": microseconds(lambda: choices(grouped, fleet, 3)),
        "base, by prefix": microseconds(lambda: choices(base, fleet)),
        "base, least loaded": microseconds(lambda: choices([PlacementRequest(None)] * 2000, fleet)),
    }
    print(f"choose, {options.replicas} replicas, {options.adapters} adapters   µs of CPU")
    for name, cost in rows.items():
        print(f"  {name:<40} {cost:8.1f}")

    def moves() -> int:
        for i in range(20_000):
            ledger.start(f"mural-{i % options.replicas:04}", 1, 16)
            ledger.finish(f"mural-{i % options.replicas:04}", 1, 16)
        return 20_000

    def views() -> int:
        for number in range(20):
            # One replica in ten has something new to say.
            told = (
                replace(replica, report=number) if i % 10 == number % 10 else replica
                for i, replica in enumerate(fleet.replicas)
            )
            ledger.observe(Fleet(tuple(told)))
        return 20

    def explanations() -> int:
        for request in plain[:50]:
            explain(request, fleet, ledger.loads)
        return 50

    print("beside it")
    print(f"  {'start and finish in the ledger':<40} {microseconds(moves):8.1f}")
    print(f"  {'a new view of the fleet taken in':<40} {microseconds(views):8.1f}")
    print(f"  {'an explanation':<40} {microseconds(explanations):8.1f}")


if __name__ == "__main__":
    main()
