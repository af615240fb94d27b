"""Replay traces under four placement policies; prints the table and draws the figure of the docs.

``--figure docs/images/placement.svg`` writes the figure. The traces and the model are stated in
`mural_router.bench.traces` and `mural_router.bench.simulator`; a run is the same every time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mural_router.bench.figure import figure, table
from mural_router.bench.policies import POLICIES, SizeBlind
from mural_router.bench.simulator import FleetModel, simulate
from mural_router.bench.traces import TRACES, mixed


def main() -> None:
    """Run, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of each trace")
    parser.add_argument("--rate", type=float, default=96.0, help="requests a second")
    parser.add_argument("--adapters", type=int, default=600)
    parser.add_argument("--figure", type=Path, help="write an SVG here")
    options = parser.parse_args()
    model = FleetModel()
    results = []
    for make in TRACES:
        trace = make(options.seconds, options.rate, options.adapters)
        results += [simulate(trace, policy, model) for policy in POLICIES]
    blind = simulate(mixed(options.seconds, options.rate, options.adapters), SizeBlind, model)
    print(f"{model}\n{options.adapters} adapters, {options.rate:g} requests/s")
    print(table([*results, blind]))
    if options.figure is not None:
        options.figure.write_text(figure(results), encoding="utf-8")


if __name__ == "__main__":
    main()
