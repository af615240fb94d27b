"""What an inference request may say that its body is: JSON as it stands.

The router names the type anew for the replica, so a replica cannot refuse what a browser's page may
post to any address without being asked: forms and plain text.
"""

from __future__ import annotations

from typing import Final

from mural_resolvers.errors import InvalidInput, quoted
from mural_router.http.head import RequestHead

__all__ = ["refuse_other_content"]

_JSON: Final = b"application/json"


def refuse_other_content(head: RequestHead) -> None:
    """Raise ``InvalidInput`` for a type other than JSON, and for a coding such as gzip."""
    named = head.named
    plain = not head.repeats and b"content-encoding" not in named
    if plain and named.get(b"content-type", _JSON) == _JSON:
        return  # So it is nearly always.
    for value in head.values(b"content-type"):
        kind = value.partition(b";")[0].strip(b" \t").lower()
        if kind and kind != b"application/json" and not kind.endswith(b"+json"):
            name = quoted(kind.decode("latin-1"))
            raise InvalidInput(f"The content type must be application/json, not {name}.")
    for value in head.values(b"content-encoding"):
        if value.lower() not in (b"", b"identity"):
            raise InvalidInput("The body must be sent without a content encoding.")
