import asyncio

from mural_router.http.cut_through import Counted
from mural_router.http.watch import Watch

SOURCE_DIGEST: str
"""Of `router/native`, when it was built."""

def scan_request(
    data: bytes, max_head_bytes: int, max_fields: int, /
) -> tuple[bytes, int, int, bool, int, int, int, bool, str | None, bytes] | None: ...
def scan_answer(data: bytes, /) -> tuple[bytes, int, bool] | None: ...
def scan_answer_head(data: bytes, /) -> bool: ...
def scan_events(data: bytes, /) -> bool: ...
def send_now(transport: asyncio.Transport, fd: int, data: bytes, /) -> None: ...

class CutThrough:
    def data_received(self, data: bytes, /) -> None: ...
    def cut_through(
        self,
        transport: asyncio.Transport,
        fd: int,
        counted: Counted,
        watch: Watch,
        idle_s: float,
        /,
    ) -> None: ...
    def take_all_in(self) -> None: ...
