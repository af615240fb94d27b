"""Makes ``uploading`` importable to the tests of this folder, and its fixtures theirs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "uploading", Path(__file__).with_name("uploading.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
uploading = importlib.util.module_from_spec(_SPEC)
sys.modules["uploading"] = uploading
_SPEC.loader.exec_module(uploading)

keys = uploading.keys
places = uploading.places
start_uploads = uploading.start_uploads
uploader = uploading.uploader
intakes = uploading.intakes
adapter = uploading.adapter
other = uploading.other
