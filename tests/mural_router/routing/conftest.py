"""Makes the made-up fleet importable to the tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "made_up_fleet", Path(__file__).with_name("made_up_fleet.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
_module = importlib.util.module_from_spec(_SPEC)
sys.modules["made_up_fleet"] = _module
_SPEC.loader.exec_module(_module)
