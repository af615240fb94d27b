"""API keys, and whom a URL names, must be in nothing that is written: how they are taken out."""

from __future__ import annotations

import logging
import re

__all__ = ["RedactingFormatter", "holds_key", "holds_secret", "redacted"]

# A message begins with a capital letter, whatever it quotes.
_MARK = "ural_"
_KEY = re.compile(r"[Mm]ural_[a-z0-9]{8,32}_[A-Za-z0-9_-]{43}")
# A message may have been cut in the middle of a key: what is left of the secret goes, too.
_SECRET = re.compile(r"([Mm]ural_[a-z0-9]{8,32}_)[A-Za-z0-9_-]{24,}")
# Whatever the scheme: a token may stand where the user does.
_USER_INFO = re.compile(r'(:/{1,3})[^\s/?#"<>]{1,1024}@')


def holds_key(text: str) -> bool:
    """Tell whether the text has something in it that has the form of an API key."""
    return _MARK in text and _KEY.search(text) is not None


def holds_secret(text: str) -> bool:
    """Tell whether `redacted` would take something out of the text."""
    return redacted(text) != text


def redacted(text: str) -> str:
    """Give the text with an ellipsis for the secret of every API key, and every URL's user info."""
    if "@" in text:
        text = _USER_INFO.sub(r"\1…@", text)
    if _MARK in text:
        text = _SECRET.sub(r"\1…", text)
    return text


class RedactingFormatter(logging.Formatter):
    """Keeps the secrets of keys out of whatever is logged, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        """The line or lines of a record."""
        return redacted(super().format(record))
