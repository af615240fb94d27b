"""``mural bench``: measures the engine on this machine.

Nothing heavy is imported before `run`, so that ``mural --help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mural_resolvers.cli import OneLineParser
from mural_resolvers.errors import MuralError
from mural_server.bench.setup import QUICK, BenchError, Setup, Sizes
from mural_server.models.errors import ModelError
from mural_server.settings import EngineSettings, SettingsError

__all__ = ["BenchCommand", "bench", "main"]

WHERES = ("in-process", "http", "peft")
DEFAULT_THREADS = 2


class BenchResult(msgspec.Struct, omit_defaults=True):
    """What ``--json`` writes: the reports that were asked for."""

    four_groups: msgspec.Raw | None = None
    loads: msgspec.Raw | None = None
    slots: msgspec.Raw | None = None
    profile: msgspec.Raw | None = None


class BenchCommand:
    """``mural bench four-groups | loads | slots | profile``."""

    help = "measure throughput and latency on this machine, beside PEFT"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add one parser per measurement."""
        measurements = parser.add_subparsers(
            dest="measurement", metavar="MEASUREMENT", required=True
        )
        for name, text in (
            (
                "four-groups",
                "base, one adapter, 8 mixed, and churn; in-process, over HTTP, and PEFT; then the "
                "decode steps while adapters load",
            ),
            ("loads", "decode steps while adapters load, and without"),
            ("slots", "TTFT with as many busy adapters as slots, and with twice as many"),
            ("profile", "where a decode step's time goes"),
        ):
            own = measurements.add_parser(
                name,
                help=text,
                description=text,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            )
            _add_common(own)
            if name == "four-groups":
                own.add_argument(
                    "--where",
                    nargs="+",
                    choices=WHERES,
                    default=list(WHERES),
                    help="ways to measure; without peft there are no ratios",
                )
                own.add_argument(
                    "--no-loads", action="store_true", help="leave the decode steps out"
                )

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print the tables, and write them where ``--json`` says."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        with tempfile.TemporaryDirectory(prefix="mural-bench-") as folder:
            try:
                setup = _setup(args, folder)
                result = _measure(args, setup)
            except ImportError as error:
                raise BenchError(
                    f"A package is missing ({error}): pip install 'mural[dev]'."
                ) from None
            except (ModelError, SettingsError) as error:
                raise BenchError(str(error)) from None
        if args.json:
            Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        return 0


bench = BenchCommand()


def main(argv: Sequence[str]) -> int:
    """``mural bench`` with these arguments; errors go to standard error."""
    parser = OneLineParser(prog="mural bench", description=bench.help)
    bench.add_arguments(parser)
    try:
        return bench.run(parser.parse_args(argv))
    except MuralError as error:
        print(f"mural bench: {error.message}", file=sys.stderr)
        return 1


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face directory or a .gguf file; left out: the packaged SmolLM2",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="bfloat16",
        help="of the base and the adapters, PEFT's too",
    )
    parser.add_argument(
        "--threads", type=_positive, default=DEFAULT_THREADS, help="of every engine, PEFT's too"
    )
    parser.add_argument(
        "--rounds", type=_positive, help=f"default {Sizes().rounds}; figures are their medians"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and adapters")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it runs, not how fast"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _setup(args: argparse.Namespace, folder: str) -> Setup:
    from mural_server.bench.adapters import make_adapters
    from mural_server.engine.build import cpu_flags
    from mural_server.models.location import default_model_path
    from mural_server.models.source import load_config

    model = args.model or default_model_path()
    sizes = QUICK if args.quick else Sizes()
    if args.rounds:
        sizes = msgspec.structs.replace(sizes, rounds=args.rounds)
    setup = Setup(
        model=model,
        dtype=EngineSettings(model=model, dtype=args.dtype).resolved_dtype(cpu_flags()),
        threads=args.threads,
        seed=args.seed,
        sizes=sizes,
        vocab_size=load_config(model).vocab_size,
        adapter_dir=folder,
    )
    _say(f"making {len(setup.adapters)} adapters")
    make_adapters(setup)
    return setup


def _measure(args: argparse.Namespace, setup: Setup) -> BenchResult:
    from mural_server.bench import report
    from mural_server.bench.four_groups import measure_four_groups
    from mural_server.bench.loads import measure_loads
    from mural_server.bench.profile import measure_profile
    from mural_server.bench.slots import measure_slots

    result = BenchResult()
    wanted = args.measurement
    if wanted == "four-groups":
        groups = measure_four_groups(setup, args.where, _say)
        report.show_four_groups(groups)
        result.four_groups = _raw(groups)
    if wanted == "loads" or (wanted == "four-groups" and not args.no_loads):
        _say("decode steps beside loads")
        loads = measure_loads(setup)
        report.show_loads(loads)
        result.loads = _raw(loads)
    if wanted == "slots":
        _say("busy adapters and slots")
        slots = measure_slots(setup)
        report.show_slots(slots)
        result.slots = _raw(slots)
    if wanted == "profile":
        _say("profiling decode steps")
        profile = measure_profile(setup)
        report.show_profile(profile)
        result.profile = _raw(profile)
    return result


def _raw(report: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(report))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
