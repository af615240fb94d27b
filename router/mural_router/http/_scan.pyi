SOURCE_DIGEST: str
"""Of `router/native`, when it was built."""

def scan_request(
    data: bytes, max_head_bytes: int, max_fields: int, /
) -> tuple[bytes, int, int, bool, int, int, int] | None: ...
def scan_answer(data: bytes, /) -> tuple[bytes, int, bool] | None: ...
