"""What a router needs on its machine."""

from __future__ import annotations

import subprocess
import sys

LOADS = """
import sys
import mural_router.process, mural_router.commands, mural_router.up
heavy = {"torch", "transformers", "numpy", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
HELP = """
import sys
import mural_router.commands, mural_router.up
heavy = {"uvloop", "uvicorn", "fastapi", "httptools"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_router_runs_without_torch():
    subprocess.run([sys.executable, "-c", LOADS], check=True, timeout=120)


def test_help_waits_for_nothing_heavy():
    subprocess.run([sys.executable, "-c", HELP], check=True, timeout=120)
