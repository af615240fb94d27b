"""One bucket of an S3 store over aiobotocore: few calls, typed, bounded in time, our errors.

The client is opened at the first call and kept, so that connections are reused. Credentials come
from botocore's own chain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import __version__ as botocore_version
from botocore.utils import parse_timestamp

from mural_resolvers.errors import TooLarge, Unavailable
from mural_resolvers.s3.answers import ObjectChanged, is_missing, mapped
from mural_resolvers.s3.settings import S3Settings

__all__ = ["Condition", "ObjectStat", "S3Client", "SmallObject", "UploadedPart"]

logger = logging.getLogger("mural.s3")

# At DEBUG botocore writes what it signs, session tokens included; a root logger is not asked.
for _chatty in ("botocore", "aiobotocore"):
    if logging.getLogger(_chatty).level == logging.NOTSET:
        logging.getLogger(_chatty).setLevel(logging.INFO)

_PIECE_BYTES = 256 << 10
_PAGE = 1000
_SMALL_BYTES = 1 << 20

Answer = Mapping[str, object]
# aiobotocore builds its clients from JSON, and has no types.
_Client = Any


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """What is known of an object without reading it; ``age_s`` by the store's own clock."""

    key: str
    size: int
    etag: str
    version_id: str | None = None
    age_s: float | None = None


@dataclass(frozen=True, slots=True)
class SmallObject:
    """An object that was read whole."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """A part of a multipart upload, as the store knows it."""

    number: int
    etag: str
    crc32: str | None


class Condition:
    """What must hold for a write: that there is no such object, or that it has this ETag."""

    def __init__(self, etag: str | None = None) -> None:
        self._etag = etag

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of botocore's call."""
        return {"IfNoneMatch": "*"} if self._etag is None else {"IfMatch": self._etag}


class S3Client:
    """One bucket. For one event loop.

    Every call raises ``Unavailable``, ``CredentialsRefused``, ``Forbidden``, and
    ``ObjectChanged`` where a condition does not hold.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: _Client | None = None

    async def read(self, key: str, max_bytes: int) -> SmallObject | None:
        """Read a small object whole, or give None; raise ``TooLarge``."""
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                client = await self._opened()
                answer = await client.get_object(**self._at(key), **self._checked)
                async with answer["Body"] as body:
                    data = await _read_bounded(body, max_bytes)
        except TooLarge:
            raise
        except Exception as error:
            if is_missing(error):
                return None
            raise mapped(error) from None
        return SmallObject(data, _text(answer, "ETag"))

    async def stat(self, key: str) -> ObjectStat | None:
        """What is known of an object, or None where there is none."""
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                answer: Answer = await (await self._opened()).head_object(**self._at(key))
        except Exception as error:
            if is_missing(error):
                return None
            raise mapped(error) from None
        version_id = answer.get("VersionId")
        return ObjectStat(
            key,
            _whole(answer, "ContentLength"),
            _text(answer, "ETag"),
            version_id if isinstance(version_id, str) else None,
            _age_s(answer),
        )

    @asynccontextmanager
    async def stream(
        self, key: str, start: int, stop: int, size: int, etag: str | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read ``[start, stop)`` of an object of a known size (and ETag) in pieces.

        Of no checksum but TCP's: S3 has none of a range, and whoever reads content hashes it.
        Raises ``ObjectMissing`` where it is gone, ``ObjectChanged`` where it is another.
        A body that breaks off raises ``Unavailable`` without a time to come back.
        """
        condition = {} if etag is None else {"IfMatch": etag}
        requested = f"bytes={start}-{stop - 1}"
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                client = await self._opened()
                answer = await client.get_object(**self._at(key), Range=requested, **condition)
        except Exception as error:
            raise mapped(error, retry_after_s=None) from None
        # Closed rather than read to its end: what is left of it may be a gigabyte.
        async with answer["Body"] as body:
            _check_range(answer, start, stop, size)
            yield _pieces(body)

    async def put(self, key: str, data: bytes, condition: Condition | None = None) -> None:
        """Write a whole object; the condition is checked by the store, at once."""
        parameters = {} if condition is None else condition.parameters
        small = len(data) <= _SMALL_BYTES
        await self._call(
            "put_object",
            self._settings.call_timeout_s if small else self._settings.part_timeout_s,
            **self._at(key),
            Body=data,
            **parameters,
        )

    async def begin_multipart(self, key: str) -> str:
        """Begin a multipart upload; give its id."""
        answer = await self._call("create_multipart_upload", **self._at(key), **self._checksum)
        return _text(answer, "UploadId")

    async def put_part(self, key: str, upload_id: str, number: int, data: bytes) -> UploadedPart:
        """Upload a part, numbered from 1."""
        answer = await self._call(
            "upload_part",
            self._settings.part_timeout_s,
            **self._at(key),
            UploadId=upload_id,
            PartNumber=number,
            Body=data,
            **self._checksum,
        )
        crc32 = _text(answer, "ChecksumCRC32") if "ChecksumCRC32" in answer else None
        return UploadedPart(number, _text(answer, "ETag"), crc32)

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], condition: Condition
    ) -> None:
        """Make the object out of its parts, under a condition as for ``put``."""
        described = [
            {"PartNumber": part.number, "ETag": part.etag}
            | ({} if part.crc32 is None else {"ChecksumCRC32": part.crc32})
            for part in sorted(parts, key=lambda part: part.number)
        ]
        await self._call(
            "complete_multipart_upload",
            self._settings.part_timeout_s,
            **self._at(key),
            UploadId=upload_id,
            MultipartUpload={"Parts": described},
            **condition.parameters,
        )

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop the parts of an upload that will not be completed."""
        await self._call("abort_multipart_upload", **self._at(key), UploadId=upload_id)

    async def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        await self._call("delete_object", **self._at(key))

    async def objects(self, prefix: str, *, limit: int) -> AsyncIterator[ObjectStat]:
        """The objects whose keys begin with a prefix, in order, at most ``limit``."""
        async for page in self._pages(limit, Prefix=prefix):
            for found in _entries(page, "Contents"):
                yield ObjectStat(_text(found, "Key"), _whole(found, "Size"), _text(found, "ETag"))

    async def folders(self, prefix: str, *, limit: int) -> tuple[str, ...]:
        """The names of what lies like folders directly under a prefix that ends with ``/``."""
        names: list[str] = []
        async for page in self._pages(limit, Prefix=prefix, Delimiter="/"):
            for found in _entries(page, "CommonPrefixes"):
                names.append(_text(found, "Prefix")[len(prefix) :].rstrip("/"))
        return tuple(names)

    async def close(self) -> None:
        """Close the connections."""
        async with self._opening:
            self._client = None
            await self._stack.aclose()

    async def _pages(self, limit: int, **parameters: object) -> AsyncIterator[Answer]:
        token: dict[str, object] = {}
        left = limit
        while left > 0:
            answer = await self._call(
                "list_objects_v2",
                Bucket=self._settings.bucket,
                MaxKeys=min(left, _PAGE),
                **parameters,
                **token,
            )
            yield answer
            left -= _PAGE
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer.get("NextContinuationToken")}

    async def _call(
        self, operation: str, timeout_s: float | None = None, /, **parameters: object
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s or self._settings.call_timeout_s):
                client = await self._opened()
                answer: Answer = await getattr(client, operation)(**parameters)
                return answer
        except Exception as error:
            raise mapped(error) from None

    @property
    def _checked(self) -> dict[str, str]:
        """Has the store send its checksum of a small object, and botocore compare it."""
        return {} if self._settings.checksums == "when_required" else {"ChecksumMode": "ENABLED"}

    @property
    def _checksum(self) -> dict[str, str]:
        """Said at both ends of a multipart upload: some stores refuse parts that have one else."""
        if self._settings.checksums == "when_required":
            return {}
        return {"ChecksumAlgorithm": "CRC32"}

    def _at(self, key: str) -> dict[str, object]:
        return {"Bucket": self._settings.bucket, "Key": key}

    async def _opened(self) -> _Client:
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    self._client = await self._open()
        return self._client

    async def _open(self) -> _Client:
        settings = self._settings
        session = AioSession(profile=settings.profile)
        session.get_component("response_parser_factory").set_parser_defaults(
            timestamp_parser=_timestamp
        )
        client: _Client = await self._stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=settings.region,
                endpoint_url=settings.endpoint_url,
                verify=None if settings.ca_bundle is None else str(settings.ca_bundle),
                config=AioConfig(
                    # Botocore reads megabytes of JSON: in a thread.
                    warm_up_loader_caches=True,
                    signature_version="s3v4",
                    s3={"addressing_style": settings.addressing_style},
                    connect_timeout=settings.connect_timeout_s,
                    read_timeout=settings.read_timeout_s,
                    retries={"total_max_attempts": settings.max_attempts, "mode": "standard"},
                    max_pool_connections=settings.max_connections,
                    request_checksum_calculation=settings.checksums,
                    response_checksum_validation="when_required",
                    # Said once: botocore would put its own together twice for each request.
                    user_agent=f"mural Botocore/{botocore_version}",
                ),
            )
        )
        logger.info("opened %s", settings.location)
        return client


def _timestamp(text: object) -> datetime:
    """What S3 writes, in a fiftieth of the time that botocore's own reading takes."""
    if isinstance(text, str):
        with suppress(ValueError, TypeError):
            return (
                parsedate_to_datetime(text)
                if text.endswith("GMT")
                else datetime.fromisoformat(text)
            )
    parsed: datetime = parse_timestamp(text)
    return parsed


async def _read_bounded(body: Any, max_bytes: int) -> bytes:
    data = bytearray()
    while piece := await body.read(_PIECE_BYTES):
        data += piece
        if len(data) > max_bytes:
            raise TooLarge(f"A record of the store has more than {max_bytes} bytes.")
    return bytes(data)


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    while True:
        try:
            piece: bytes = await body.read(_PIECE_BYTES)
        except Exception as error:
            raise mapped(error, retry_after_s=None) from None
        if not piece:
            return
        yield piece


def _check_range(answer: Answer, start: int, stop: int, size: int) -> None:
    """A store, or a proxy, may ignore the range; an object may have grown or shrunk."""
    stated = answer.get("ContentRange")
    if stated is None and (start, stop) == (0, size):
        stated = f"bytes 0-{size - 1}/{_whole(answer, 'ContentLength')}"
    if stated is None:
        raise Unavailable("The store of adapters ignores ranges.")
    if stated != f"bytes {start}-{stop - 1}/{size}":
        raise ObjectChanged("The object in the store has another size.")


def _text(answer: Answer, field: str) -> str:
    value = answer.get(field)
    if not isinstance(value, str):
        raise Unavailable(f"The store of adapters answered without {field}.")
    return value


def _whole(answer: Answer, field: str) -> int:
    value = answer.get(field)
    if not isinstance(value, int):
        raise Unavailable(f"The store of adapters answered without {field}.")
    return value


def _entries(page: Answer, field: str) -> list[Answer]:
    entries = page.get(field, [])
    return entries if isinstance(entries, list) else []


def _age_s(answer: Answer) -> float | None:
    modified, metadata = answer.get("LastModified"), answer.get("ResponseMetadata")
    headers = metadata.get("HTTPHeaders") if isinstance(metadata, dict) else None
    now = headers.get("date") if isinstance(headers, dict) else None
    if not isinstance(modified, datetime) or not isinstance(now, str):
        return None
    try:
        return (parsedate_to_datetime(now) - modified).total_seconds()
    except (ValueError, TypeError):
        return None
