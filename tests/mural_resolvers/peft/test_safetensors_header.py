"""The header of a safetensors file."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import TooLarge, UnusableAdapter
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.peft import TensorInfo, read_safetensors_header


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(
    start: int, end: int, shape: list[object] | None = None, dtype: object = "U8"
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [end - start], "data_offsets": [start, end]}


def test_a_header_is_read_from_bytes_and_from_a_file(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 8, [2, 1], "F32"), "b": entry(8, 9)}
    data = file_of(header, b"x" * 9)
    (tmp_path / "f").write_bytes(data)

    expected = {"a": TensorInfo("F32", (2, 1), (0, 8)), "b": TensorInfo("U8", (1,), (8, 9))}
    assert read_safetensors_header(data) == expected
    assert read_safetensors_header(tmp_path / "f") == expected
    assert read_safetensors_header(data[:-9], file_bytes=len(data)) == expected


def test_scalars_empty_tensors_and_padding_are_read() -> None:
    header = json.dumps({"s": entry(0, 4, [], "F32") | {"shape": []}, "e": entry(4, 4, [0, 3])})

    read = read_safetensors_header(file_of(header.encode() + b"   ", b"1234"))

    assert read["s"].shape == ()
    assert read["e"].num_bytes == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "shorter than 8"),
        (b"1234567", "shorter than 8"),
        (file_of({}, length=3), "longer than the file|cannot|refused|takes|bytes"),
        (file_of({}, length=2**63), "longer than the file"),
        (file_of({}, length=100), "longer than the file"),
        (file_of(b" {}"), "brace"),
        (file_of(b"[]"), "brace"),
        (file_of(b"{"), "JSON"),
        (file_of(b"{} x"), "JSON"),
        (file_of(b"\xff"), "brace"),
        (file_of(b'{"\xff": 1}'), "UTF-8"),
        (file_of(b'{"a": 1, "a": 1}'), "twice"),
        (file_of(b'{"a": NaN}'), "NaN"),
        (file_of(b'{"a": ' * 5000), "deeper"),
        (file_of({"__metadata__": []}), "__metadata__"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
        (file_of({"a": 1}), "not described"),
        (file_of({"a": None}), "not described"),
        (file_of({"a": {}}), "not described"),
        (file_of({"a": {**entry(0, 1), "more": 1}}, b"1"), "not described"),
        (file_of({"a": entry(0, 1, dtype="F4")}, b"1"), "dtype"),
        (file_of({"a": entry(0, 1, dtype=["U8"])}, b"1"), "dtype"),
        (file_of({"a": entry(0, 1, [-1])}, b"1"), "shape"),
        (file_of({"a": entry(0, 1, [True])}, b"1"), "shape"),
        (file_of({"a": entry(0, 1, [1.0])}, b"1"), "shape"),
        (file_of({"a": entry(0, 1, ["1"])}, b"1"), "shape"),
        (file_of({"a": entry(0, 1, [1] * 9)}, b"1"), "shape"),
        (file_of({"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}, b"1"), "shape"),
        (file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"1"), "data_offsets"),
        (file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}, b"1"), "offsets"),
        (file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}, b"1"), "offsets"),
        (file_of({"a": entry(0, 1, [2])}, b"1"), "do not fill"),
        (file_of({"a": entry(0, 1, [2**62, 2**62])}, b"1"), "do not fill"),
        (file_of({"a": entry(0, 2), "b": entry(1, 3)}, b"123"), "overlaps"),
        (file_of({"a": entry(0, 1), "b": entry(2, 3)}, b"123"), "hole"),
        (file_of({"a": entry(1, 2)}, b"12"), "hole"),
        (file_of({"a": entry(0, 1), "b": entry(0, 1)}, b"1"), "overlaps"),
        (file_of({"a": entry(0, 3)}, b"12"), "take 3 bytes"),
        (file_of({"a": entry(0, 1)}, b"12"), "take 1 bytes"),
        (file_of({"": entry(0, 1)}, b"1"), "empty or too long"),
        (file_of({"n" * 600: entry(0, 1)}, b"1"), "empty or too long"),
    ],
    ids=range(41),
)
def test_a_header_that_lies_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnusableAdapter, match=reason):
        read_safetensors_header(data)


def test_a_header_above_its_limit_is_not_read() -> None:
    limits = AdapterLimits(max_header_bytes=64)

    with pytest.raises(TooLarge):
        read_safetensors_header(file_of(b"{" + b" " * 64 + b"}"), limits)


def test_more_tensors_than_the_limit_are_refused() -> None:
    header = {f"t{n}": entry(n, n + 1) for n in range(3)}

    with pytest.raises(TooLarge):
        read_safetensors_header(file_of(header, b"123"), AdapterLimits(max_tensors=2))


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(UnusableAdapter, match="not a regular file"):
        read_safetensors_header(tmp_path / "pipe")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_typed_refusal(data: bytes) -> None:
    try:
        read_safetensors_header(data)
    except (UnusableAdapter, TooLarge):
        return


@given(st.randoms(use_true_random=False))
def test_a_valid_file_that_is_changed_is_refused_or_still_adds_up(rng: random.Random) -> None:
    header = {"__metadata__": {"a": "b"}, "a": entry(0, 8, [2], "F32"), "b": entry(8, 12, [2, 2])}
    data = bytearray(file_of(header, b"x" * 12))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        tensors = read_safetensors_header(bytes(data))
    except (UnusableAdapter, TooLarge) as error:
        error.message.encode()
        return
    assert sum(tensor.num_bytes for tensor in tensors.values()) <= 12


@given(
    st.lists(
        st.tuples(
            st.sampled_from([("F32", "f4"), ("F16", "f2"), ("I8", "i1"), ("U64", "u8")]),
            st.lists(st.integers(0, 3), max_size=4),
        ),
        max_size=5,
    )
)
def test_what_the_safetensors_library_writes_is_read(
    tensors: list[tuple[tuple[str, str], list[int]]],
) -> None:
    numpy = pytest.importorskip("numpy")
    save = pytest.importorskip("safetensors.numpy").save
    arrays = {f"t{n}": numpy.zeros(shape, code) for n, ((_, code), shape) in enumerate(tensors)}

    read = read_safetensors_header(save(arrays))

    assert {name: (tensor.dtype, tensor.shape) for name, tensor in read.items()} == {
        f"t{n}": (dtype, tuple(shape)) for n, ((dtype, _), shape) in enumerate(tensors)
    }
