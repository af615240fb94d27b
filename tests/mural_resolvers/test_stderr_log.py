"""What a log line looks like, as a process of its own writes it."""

from __future__ import annotations

import re
import subprocess
import sys

LOGS = """
import logging, os, time
os.environ["TZ"] = "Asia/Tokyo"; time.tzset()
from mural_resolvers.stderr_log import log_to_stderr
log_to_stderr("info")
logging.getLogger("mural").info("up as %s", "mural_abcdefgh_" + "s" * 43)
logging.getLogger("mural").debug("not told")
"""


def test_a_line_has_the_time_in_utc_and_no_secret() -> None:
    run = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, timeout=60)

    [line] = run.stderr.splitlines()
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d):\d\d:\d\d\.\d{3}Z INFO up as (.*)", line)
    assert found is not None, line
    assert found[2] == "mural_abcdefgh_…"


def test_the_hour_is_not_the_machines_own() -> None:
    now = "import datetime; print(datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%dT%H'))"
    before, log, after = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        for code in (now, LOGS, now)
    )

    assert log.stderr[:13] in (before.stdout.strip(), after.stdout.strip())
