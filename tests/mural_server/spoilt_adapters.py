"""What can be wrong with an adapter's folder: ways to spoil one, and how often each is tried."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 16
"""Of the server that is asked for them."""

Spoil = Callable[[Path, random.Random], None]


def change_config(folder: Path, **changes: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def change_header(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header = change(header) or header
    raw = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def some(tensors: dict[str, np.ndarray] | dict[str, object], draw: random.Random) -> str:
    return draw.choice(sorted(key for key in tensors if key != "__metadata__"))


def truncate(name: str) -> Spoil:
    def spoil(folder: Path, draw: random.Random) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, draw.randrange(size))

    return spoil


def flip_bytes(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice([CONFIG, WEIGHTS])
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)


def insert_bytes(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice([CONFIG, WEIGHTS])
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    data[at:at] = draw.randbytes(draw.randint(1, 200))
    path.write_bytes(data)


def wrong_shape(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        key = some(tensors, draw)
        old = tensors[key]
        tensors[key] = draw.choice([
            old.T.copy(), old[:-1].copy(), old[:, :-1].copy(), old[None], old.reshape(-1),
            np.zeros((0, old.shape[1]), old.dtype), np.zeros((old.shape[0], 0), old.dtype),
            np.pad(old, ((0, 1), (0, 0))), np.zeros((), old.dtype),
        ])  # fmt: skip

    change_tensors(folder, change)


def wrong_dtype(folder: Path, draw: random.Random) -> None:
    kinds = [np.int8, np.uint8, np.int32, np.int64, np.bool_, np.float16, np.float64]

    def change(tensors: dict[str, np.ndarray]) -> None:
        key = some(tensors, draw)
        tensors[key] = tensors[key].astype(draw.choice(kinds))

    change_tensors(folder, change)


def not_finite(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        flat = tensors[some(tensors, draw)].reshape(-1)
        flat[draw.randrange(flat.size)] = draw.choice([np.nan, np.inf, -np.inf])

    change_tensors(folder, change)


def overflowing(folder: Path, draw: random.Random) -> None:
    """Finite numbers whose products are not."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[some(tensors, draw)].reshape(-1)[:] = draw.choice([3e38, -3e38, 1e30])

    change_tensors(folder, change)


def missing_tensor(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[some(tensors, draw)]

    change_tensors(folder, change)


def extra_tensor(folder: Path, draw: random.Random) -> None:
    names = [
        "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.x_proj.lora_B.weight",
        "base_model.model.lm_head.weight", "base_model.model.score.weight", "x", "../../x",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.other.weight",
        "base_model.model.model.embed_tokens.weight", "\N{SNOWMAN}", "x" * 600,
    ]  # fmt: skip

    def change(tensors: dict[str, np.ndarray]) -> None:
        shape = draw.choice([(2, 2), (259, 64), (8, 64), (64,)])
        tensors[draw.choice(names)] = np.ones(shape, np.float32)

    change_tensors(folder, change)


def swapped_halves(folder: Path, draw: random.Random) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        key = draw.choice([key for key in sorted(tensors) if "lora_A" in key])
        other = key.replace("lora_A", "lora_B")
        tensors[key], tensors[other] = tensors[other], tensors[key]

    change_tensors(folder, change)


def lying_header(folder: Path, draw: random.Random) -> None:
    def change(header: dict[str, object]) -> object:
        entry = header[some(header, draw)]
        assert isinstance(entry, dict)
        start, end = entry["data_offsets"]
        kind = draw.randrange(10)
        lies: list[dict[str, object]] = [
            {"data_offsets": [start, end + 4]}, {"data_offsets": [end, start]},
            {"data_offsets": [0, 1 << 60]}, {"data_offsets": [-4, end - start - 4]},
            {"shape": [1 << 40, 1 << 40]}, {"shape": [-1, -1]}, {"shape": "x"},
            {"dtype": draw.choice(["F8_E4M3", "X", "", None, "BF16"])},
            {"extra": 1}, {"shape": [1.5, 2]},
        ]  # fmt: skip
        entry.update(lies[kind])
        return header

    change_header(folder, change)


def hostile_header(folder: Path, draw: random.Random) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    raw = data[8 : 8 + length]
    many = b'{"' + b'","'.join(b"k%d" % i for i in range(9)) + b'"}'
    written = draw.choice([
        (1 << 63, raw), ((1 << 64) - 1, raw), (0, b""), (7, raw), (length + 1, raw),
        (1 << 20, raw), (None, b"[]"), (None, b"{}"), (None, b"null"), (None, many),
        (None, b"{" * 100_000), (None, b'{"a":' * 50_000), (None, b'"' * 100_001),
        (None, b'{"__metadata__":{"a":1}}'), (None, b'{"__metadata__":[]}'),
        (None, raw[:-1] + b"," + raw[1:]), (None, raw.replace(b"F32", b"\xff\xfe")),
        (None, b'{"a":{"dtype":"F32","shape":[' + b"1," * 50_000 + b'1],"data_offsets":[0,4]}}'),
        (None, raw[:-1] + b',"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}'),
        (None, raw + b" " * (5 << 20)),
    ])  # fmt: skip
    stated = len(written[1]) if written[0] is None else written[0]
    (folder / WEIGHTS).write_bytes(stated.to_bytes(8, "little") + written[1] + data[8 + length :])


def hostile_json(folder: Path, draw: random.Random) -> None:
    good = (folder / CONFIG).read_bytes()
    (folder / CONFIG).write_bytes(draw.choice([
        b"", b"null", b"[]", b"0", b'"x"', b"\x00" * 100, b"\xff\xfe{\x00}\x00", b"{" * 200_000,
        b"[" * 200_000, b'{"r":' * 1000, good + b"x", good[:-1] + b',"r":4}', good[:-2],
        b"\xef\xbb\xbf" + good, good.replace(b'"r": 8', b'"r": ' + b"9" * 5000),
        good.replace(b'"r": 8', b'"r": NaN'), good.replace(b'"r": 8', b'"r": 1e400'),
        good.replace(b'"r": 8', b'"r": -1'), good.replace(b'"r": 8', b'"r": 8.0'),
        good.replace(b'"r": 8', b'"r": "8"'), good.replace(b'"r": 8', b'"r": true'),
        good[:-1] + b',"x":"\\ud800"}', good[:-1] + b',"\\ud800":1}', b" " * (2 << 20) + good,
        good[:-1] + b',"x":"' + b"y" * (1 << 20) + b'"}', b"'" + good, good.upper(),
    ]))  # fmt: skip


def other_config(folder: Path, draw: random.Random) -> None:
    changes: list[dict[str, object]] = [
        {"r": 1 << 15}, {"r": 9}, {"r": 0}, {"lora_alpha": 1e308}, {"lora_alpha": None},
        {"lora_alpha": "x"}, {"lora_alpha": 1e9}, {"peft_type": "IA3"}, {"peft_type": None},
        {"use_dora": True}, {"lora_bias": True}, {"bias": "all"}, {"modules_to_save": ["score"]},
        {"layer_replication": [[0, 1]]}, {"target_modules": []}, {"target_modules": None},
        {"target_modules": ["q_proj"]}, {"target_modules": "("}, {"target_modules": "(?<n"},
        {"target_modules": ["("]}, {"target_modules": {"a": 1}}, {"target_modules": 5},
        {"target_modules": ["x" * 3000]}, {"target_modules": ["q_proj"] * 10_000},
        {"exclude_modules": ["q_proj"]}, {"exclude_modules": ".*"}, {"task_type": "SEQ_CLS"},
        {"rank_pattern": {"q_proj": 3}}, {"rank_pattern": {"(": 3}}, {"rank_pattern": [1]},
        {"rank_pattern": {"x": -1}}, {"alpha_pattern": {"q_proj": 1e300}}, {"use_rslora": "yes"},
        {"fan_in_fan_out": True}, {"init_lora_weights": "pissa"}, {"layers_to_transform": [99]},
        {"layers_to_transform": "x"}, {"layers_pattern": "layers"},
        {"trainable_token_indices": [1]},
        {"rank_pattern": {str(i): 1 for i in range(3000)}}, {"a_new_feature": {"on": True}},
        {"target_modules": "a" * 2000 + "{1,65535}" * 5}, {"target_modules": "(" * 900 + ")" * 900},
        {"target_modules": "x{99999999999}"}, {"modules_to_save": ["lm_head"]},
    ]  # fmt: skip
    change_config(folder, **draw.choice(changes))


def other_base(folder: Path, draw: random.Random) -> None:
    """Trained on a base of other widths, layers or names."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        kind = draw.randrange(3)
        for key in sorted(tensors):
            value = tensors.pop(key)
            if kind == 0:
                tensors[key] = np.repeat(value, 2, axis=int("lora_A" in key))
            elif kind == 1:
                tensors[key.replace("layers.", "layers.1")] = value
            else:
                tensors[key.replace("model.layers", "transformer.h")] = value

    change_tensors(folder, change)
    change_config(folder, base_model_name_or_path="someone/else-70b")


def huge_rank(folder: Path, draw: random.Random) -> None:
    rank = draw.choice([MAX_RANK + 1, 64, 512, 4096])

    def change(tensors: dict[str, np.ndarray]) -> None:
        for key, value in list(tensors.items()):
            shape = (rank, value.shape[1]) if "lora_A" in key else (value.shape[0], rank)
            tensors[key] = np.full(shape, 1e-3, np.float32)

    change_tensors(folder, change)
    change_config(folder, r=rank, rank_pattern={})


def odd_file(folder: Path, draw: random.Random) -> None:
    """Something that is no regular file, or leads elsewhere, in place of a file."""
    path = folder / draw.choice([CONFIG, WEIGHTS, WEIGHTS, "chat_template.jinja", "manifest.json"])
    secret = folder.parent.parent.parent.parent / "secret"
    path.unlink(missing_ok=True)
    match draw.randrange(11):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(secret)
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.symlink_to("/dev/zero")
        case 5:
            path.symlink_to("/proc/self/environ")
        case 6:
            path.symlink_to("../" * 30 + "etc/passwd")
        case 7:
            path.symlink_to(f"{secret}/below-a-file")
        case 8:
            path.symlink_to("x" * 4000)
        case 9:
            if os.geteuid() != 0:
                os.mkfifo(path)
            else:
                os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero itself
        case 10:
            path.write_bytes(b"")


def empty_or_gone(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice([CONFIG, WEIGHTS])
    path.unlink()
    if draw.random() < 0.5:
        path.touch()


def no_permission(folder: Path, draw: random.Random) -> None:
    """Root may read it all the same, and then it is a good adapter."""
    (folder / draw.choice([CONFIG, WEIGHTS])).chmod(0)


class Payload:
    """What a pickle runs when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def pickle_payload(folder: Path, draw: random.Random) -> None:
    command = f"touch {folder.parent.parent.parent.parent}/executed"
    if draw.random() < 0.5:
        torch.save({"x": Payload(command)}, folder / "adapter_model.bin")
    else:
        (folder / "adapter_model.bin").write_bytes(pickle.dumps(Payload(command)))
    if draw.random() < 0.8:
        (folder / WEIGHTS).unlink()


def hostile_manifest(folder: Path, draw: random.Random) -> None:
    (folder / "manifest.json").write_text(draw.choice([
        "", "{}", "[]", "x" * (2 << 20), "[" * 100_000,
        json.dumps({"files": [], "facts": {"rank": 1, "alpha": 1, "targets": []}, "digest": "0"}),
        json.dumps({"files": [{"path": "../x", "size": 1, "sha256": "0" * 64}],
                    "facts": {"rank": 1, "alpha": 1, "targets": []}, "digest": "0" * 64}),
    ]))  # fmt: skip


BOMB = r"(([a-z_.0-9]+)+)+!"
"""Takes longer than anybody waits on any module's name."""


def regex_bomb(folder: Path, draw: random.Random) -> None:
    bombs: list[dict[str, Any]] = [
        {"target_modules": BOMB}, {"rank_pattern": {BOMB: 8}}, {"exclude_modules": BOMB},
    ]  # fmt: skip
    change_config(folder, **draw.choice(bombs))


def harmless(folder: Path, draw: random.Random) -> None:
    """Nothing that the engine reads is another: it must go on answering."""
    match draw.randrange(6):
        case 0:
            (folder / "README.md").write_bytes(draw.randbytes(1000))
        case 1:
            (folder / "optimizer.pt").write_bytes(pickle.dumps(Payload("false")))
        case 2:
            change_config(folder, lora_dropout=0.5, peft_version="99", inference_mode=False)
        case 3:
            (folder / "\N{SNOWMAN}\u202e").mkdir()
        case 4:
            shutil.move(folder / WEIGHTS, folder / "real")
            (folder / WEIGHTS).symlink_to("real")
        case 5:
            os.mkfifo(folder / "pytorch_model.bin")


class Kind(NamedTuple):
    spoil: Spoil
    times: int
    always_refused: bool = False
    always_served: bool = False


KINDS = [
    Kind(truncate(WEIGHTS), 12, always_refused=True),
    Kind(truncate(CONFIG), 6, always_refused=True),
    Kind(flip_bytes, 12),
    Kind(insert_bytes, 6),
    Kind(wrong_shape, 10, always_refused=True),
    Kind(wrong_dtype, 10),
    Kind(not_finite, 8, always_refused=True),
    Kind(overflowing, 4),
    Kind(missing_tensor, 6, always_refused=True),
    Kind(extra_tensor, 12, always_refused=True),
    Kind(swapped_halves, 4, always_refused=True),
    Kind(lying_header, 12, always_refused=True),
    Kind(hostile_header, 18),
    Kind(hostile_json, 18),
    Kind(other_config, 18),
    Kind(other_base, 4, always_refused=True),
    Kind(huge_rank, 3, always_refused=True),
    Kind(odd_file, 24),
    Kind(empty_or_gone, 3, always_refused=True),
    Kind(no_permission, 2),
    Kind(pickle_payload, 2),
    Kind(hostile_manifest, 3),
    Kind(regex_bomb, 1, always_refused=True),
    Kind(harmless, 2, always_served=True),
]
