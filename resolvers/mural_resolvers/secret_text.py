"""Tokens and URLs with passwords, as a process is handed them: in a file or a variable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from mural_resolvers.errors import InvalidInput
from mural_resolvers.file_watch import FileWatch
from mural_resolvers.files import read_settings

__all__ = ["read_secret", "watch_secret"]

MAX_SECRET_BYTES: Final = 4096
_SECRET: Final = re.compile(rf"[!-~]{{0,{MAX_SECRET_BYTES}}}")


def read_secret(
    path: object, flag: str, variable: str, environment: Mapping[str, str]
) -> str | None:
    """From the file, else from the environment; None: from neither.

    Blanks around it are no part of it. Raises ``InvalidInput``, without what was read.
    """
    if isinstance(path, str):
        where = f"--{flag.replace('_', '-')}: {path}"
        secret = _file_text(path, where).strip()
        if not secret:
            raise InvalidInput(f"{where} is empty.")
    else:
        where, secret = variable, environment.get(variable, "").strip()
    if not _SECRET.fullmatch(secret):
        # It goes into a header or a URL: a line's end in it would make two of one.
        raise InvalidInput(
            f"{where}: one word of at most {MAX_SECRET_BYTES} ASCII characters is wanted."
        )
    return secret or None


def watch_secret(path: str, flag: str, renew: Callable[[str], None], *, what: str) -> FileWatch:
    """Tell ``renew`` what the file says when that has changed while the process runs.

    A file that is missing, empty or no secret leaves the one in hand. ``what`` it is, for the log.
    """

    def reload() -> None:
        secret = read_secret(path, flag, "", {})
        assert secret is not None, "an empty file is refused"
        renew(secret)

    return FileWatch([path], reload, what=what)


def _file_text(path: str, where: str) -> str:
    try:
        return read_settings(Path(path), 2 * MAX_SECRET_BYTES).decode("ascii")
    except OSError as error:
        raise InvalidInput(f"{where}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{where} is not ASCII text.") from None
