"""What a rank adds to a sequence's cost: the grounds of placement's `rank_cost`.

Decode steps of a full batch of the base, of one adapter, and of an adapter for each sequence, in
turns on one engine for each rank. A step's time over the base's, less one, is what adapters add;
divided by the rank, what each rank adds to a sequence, in sequences.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from mural_server.bench.adapters import make_adapters
from mural_server.bench.core_driver import CoreDriver
from mural_server.bench.setup import Group, Setup, Sizes, group_jobs
from mural_server.engine.build import cpu_flags
from mural_server.models.location import default_model_path
from mural_server.models.source import load_config
from mural_server.settings import EngineSettings

BATCHES: tuple[Group, ...] = ("base", "one", "mixed")
STEPS = 24


def measure(model: str, rank: int, batch: int, rounds: int) -> dict[Group, float]:
    """Median seconds of a decode step of each kind of batch."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = Sizes(
            concurrency=batch,
            rank=rank,
            slots=batch,
            churn_adapters=0,
            host_adapters=batch,
            prompt_tokens=32,
        )
        setup = Setup(
            model=model,
            dtype=EngineSettings(model=model).resolved_dtype(cpu_flags()),
            sizes=sizes,
            vocab_size=load_config(model).vocab_size,
            adapter_dir=folder,
        )
        make_adapters(setup)
        steps: dict[Group, list[float]] = {kind: [] for kind in BATCHES}
        with CoreDriver(setup) as driver:
            for turn in range(rounds + 1):
                for kind in BATCHES:
                    driver.start_batch(group_jobs(setup, kind, turn))
                    times = [driver.step() for _ in range(STEPS)]
                    driver.end_batch()
                    if turn:  # The first of each loads and warms up.
                        steps[kind] += times
    return {kind: statistics.median(times) for kind, times in steps.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = options.model or default_model_path()
    print("| rank | base step ms | one adapter / base | each its own / base | a rank adds |")
    print("|---|---|---|---|---|")
    for rank in options.ranks:
        base, one, own = measure(model, rank, options.batch, options.rounds).values()
        per_rank = (own / base - 1) / rank
        print(
            f"| {rank} | {base * 1e3:.1f} | {one / base:.2f} | {own / base:.2f} "
            f"| 1/{1 / per_rank:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
