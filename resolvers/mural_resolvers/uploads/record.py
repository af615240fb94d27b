"""What is kept of an upload beside its files: when it came, until when it stays, by whose key."""

from __future__ import annotations

import msgspec

from mural_resolvers.errors import UnusableAdapter

__all__ = ["UPLOAD_FILE", "UploadRecord"]

UPLOAD_FILE = "_upload.json"


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds since the epoch; ``expires_at`` None: it stays."""

    uploaded_at: float
    expires_at: float | None
    key_id: str | None
    digest: str

    def has_expired(self, now: float) -> bool:
        """Whether it is gone for whoever asks at that time."""
        return self.expires_at is not None and now >= self.expires_at

    def to_json(self) -> bytes:
        """Give the form of ``_upload.json``."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> UploadRecord:
        """Read ``to_json``'s form; raise ``UnusableAdapter`` for any other."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise UnusableAdapter(f"{UPLOAD_FILE} is not the record of an upload.") from None
