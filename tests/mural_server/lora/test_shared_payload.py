"""Memory that the loader process fills and its parent takes over."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from mural_server.lora.shared_payload import SharedPayload, check_sealed


@pytest.fixture
def payload():
    shared = SharedPayload()
    yield shared
    shared.close()


def test_what_was_written_is_what_is_taken_over_after_the_writer_has_let_go(payload):
    block = payload.allocate(10_000)
    block[:] = np.arange(10_000, dtype=np.uint32).view(np.uint8)[:10_000]
    written = block.tobytes()
    del block
    kept = os.dup(payload.seal())
    payload.close()
    check_sealed(kept, 10_000)
    assert os.pread(kept, 20_000, 0) == written
    os.close(kept)


def test_nobody_writes_to_the_memory_after_it_was_sealed(payload):
    payload.allocate(4096)
    descriptor = payload.seal()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096)
    with pytest.raises(PermissionError):
        os.write(descriptor, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


@pytest.mark.parametrize("said", [4095, 4097, 0])
def test_memory_of_another_size_than_was_said_is_refused(payload, said):
    payload.allocate(4096)
    with pytest.raises(ValueError, match="size"):
        check_sealed(payload.seal(), said)


def test_memory_that_could_still_change_is_refused():
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="sealed"):
        check_sealed(descriptor, 4096)
    os.close(descriptor)


def test_memory_that_somebody_still_views_is_not_sealed(payload):
    block = payload.allocate(4096)
    with pytest.raises(BufferError):
        payload.seal()
    assert block.size == 4096


def test_nothing_stays_open_when_the_load_failed_before_its_end():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        shared = SharedPayload()
        shared.allocate(4096)
        shared.close()
    assert len(os.listdir("/proc/self/fd")) == before
