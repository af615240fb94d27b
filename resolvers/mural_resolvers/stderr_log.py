"""How every process of Mural logs: one line a record on standard error, with the time in UTC."""

from __future__ import annotations

import logging
import sys
import time

from mural_resolvers.redaction import RedactingFormatter

__all__ = ["log_to_stderr"]


def log_to_stderr(level: str) -> None:
    """Send this process's log to standard error, from ``level`` ("info", say) upwards."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_TimedFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _TimedFormatter(RedactingFormatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"
