"""The plainest requests and answers, each read at one go: native, where that could be built.

What is accepted here is accepted by `http.head` and `routing.inspect_body` too, and read alike; all
else is None and is read there. Nothing is refused here. Sources: ``router/native/scan.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "PlainAnswer",
    "PlainRequest",
    "plain_answer",
    "plain_answer_head",
    "plain_events",
    "plain_request",
]

PlainRequest = tuple[bytes, int, int, bool, int, int, int, bool, str | None, bytes]
"""One whole request to generate one sequence, with none of the rarer fields and members.

A key of its path, ``=`` and its Authorization where there is one, and its model, each on a line;
the bytes of its prompt (a text, or a list of token ids or of one prompt); its bound of tokens, or
-1; whether it streams; where its body begins, and where in the whole the model's value begins and
ends, with its quotes; whether it asks for the usage at a stream's end; its own request id, or None;
the fields of its trace (``traceparent``, ``tracestate``), each after a CRLF.
"""

PlainAnswer = tuple[bytes, int, bool]
"""One whole answer 200 with a length, on a connection that stays.

The fields that are passed on, each after a CRLF; where its body begins; whether it says which
content served (``x-mural-digest``).
"""

plain_request: Callable[[bytes, int, int], PlainRequest | None] | None
"""``(data, max_head_bytes, max_fields)``: None for anything but one such request; itself None where
it is not built."""
plain_answer: Callable[[bytes], PlainAnswer | None] | None
"""None for anything but one such answer; itself None where it is not built."""
plain_answer_head: Callable[[bytes], bool] | None
"""Whether it is the head of such an answer and nothing of its body: most servers write the one
after the other. Itself None where it is not built."""
plain_events: Callable[[bytes], bool] | None
"""Whether a piece of a stream is whole chunks, each of whole events, none of which tells the usage:
`mural_router.proxy.events` gives it back as it is. Itself None where it is not built."""

try:
    from mural_router.http._scan import scan_answer as plain_answer
    from mural_router.http._scan import scan_answer_head as plain_answer_head
    from mural_router.http._scan import scan_events as plain_events
    from mural_router.http._scan import scan_request as plain_request
except ImportError:
    plain_request = plain_answer = plain_answer_head = plain_events = None
