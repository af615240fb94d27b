"""The control API of a Mural server that is ready and holds nothing, for routers to follow."""

from __future__ import annotations

import asyncio

import msgspec

from mural_server.protocol import Base, Heartbeat, Limits, Load, PrefixStatistics, Snapshot


async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Its state stream, with a heartbeat a second, until the router goes."""
    await reader.readuntil(b"\r\n\r\n")
    snapshot = Snapshot(
        boot_id="boot",
        seq=0,
        base=Base(model_names=("base",), spec_hash=""),
        limits=Limits(
            slots=4,
            max_cpu_loras=8,
            host_bytes=0,
            max_lora_rank=8,
            max_num_seqs=64,
            max_model_len=4096,
        ),
        load=Load(),
        prefix=PrefixStatistics(),
        accepting=True,
        ready=True,
    )
    writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: " + msgspec.json.encode(snapshot) + b"\n\n")
    beat = msgspec.json.encode(Heartbeat(boot_id="boot", seq=0))
    gone = asyncio.create_task(reader.read())
    while not (await asyncio.wait({gone}, timeout=1))[0]:
        writer.write(b"data: " + beat + b"\n\n")
    writer.close()
