"""Reading a folder: what is taken, how it is rounded, and what is refused with which reason."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mural_resolvers.errors import ManifestMismatch, MuralError, TooLarge, UnusableAdapter
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import MANIFEST_FILE, build_manifest
from mural_server.lora.base_copies import BaseDigests
from mural_server.lora.checkpoint import LoadOptions, WeightDType, read_checkpoint
from mural_server.lora.model import LoRAModel

WEIGHTS = "adapter_model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
Q_A, Q_B = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")


@pytest.fixture(scope="module")
def plain(lab):
    return lab.write(42).path


@pytest.fixture
def edit(plain, tmp_path):
    """A copy of the adapter with its tensors or its configuration changed."""

    def edited(tensors=lambda t: None, **config):
        folder = tmp_path / "edited"
        shutil.copytree(plain, folder, dirs_exist_ok=True)
        held = load_file(folder / WEIGHTS)
        tensors(held)
        save_file({name: value.contiguous() for name, value in held.items()}, folder / WEIGHTS)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return edited


def load(lab, folder, dtype="float32", **options):
    return LoRAModel.from_local_checkpoint(
        folder, lab.spec, LoadOptions(dtype=dtype, **options), lora_model_id=1
    )


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16, torch.float16])
def test_conversion_rounds_as_torch_does(lab, edit, stored, served):
    def convert(tensors):
        for name in tensors:
            tensors[name] = tensors[name].to(stored)

    folder = edit(convert)
    held = load_file(folder / WEIGHTS)
    q = load(lab, folder, str(served).removeprefix("torch.")).loras[Q]
    assert torch.equal(q.lora_a, held[Q_A].float().to(served))
    assert torch.equal(q.lora_b, (held[Q_B].float().t() * 3.0).to(served))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", [Q_A, Q_B])
def test_numbers_that_are_not_finite_are_refused_by_name(lab, edit, value, stored, key):
    def spoil(tensors):
        tensors[key] = tensors[key].to(stored)
        tensors[key][1, 2] = value

    with pytest.raises(UnusableAdapter, match=r"q_proj.*NaN or an infinity"):
        load(lab, edit(spoil))


@pytest.mark.parametrize(
    ("served", "value"), [("float32", 2e38), ("bfloat16", 3.4e38), ("float16", 6e4)]
)
def test_what_the_scale_or_the_dtype_carries_to_infinity_is_refused(lab, edit, served, value):
    def grow(tensors):
        tensors[Q_B][0, 0] = value

    with pytest.raises(UnusableAdapter, match=f"q_proj.*{served} cannot hold, scale included"):
        load(lab, edit(grow), served)


def test_a_tensor_without_a_place_is_refused_by_name(lab, edit):
    def add(tensors):
        tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.ones(
            4, 48
        )

    with pytest.raises(UnusableAdapter, match=r"layers\.9"):
        load(lab, edit(add))


def test_an_adapter_that_matches_no_module_is_refused(lab, edit):
    with pytest.raises(UnusableAdapter, match="matches no module"):
        load(lab, edit(lambda tensors: tensors.clear()))


def test_a_target_that_the_server_leaves_out_is_refused_by_name(lab, plain):
    with pytest.raises(UnusableAdapter, match=r"k_proj.*lora_target_modules"):
        load(lab, plain, target_modules=("q_proj",))


def test_too_high_a_rank_is_refused(lab):
    written = lab.write(r=9)
    with pytest.raises(UnusableAdapter, match=r"rank 9.*max_lora_rank"):
        load(lab, written.path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["score"]}, "modules_to_save"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ],
)
def test_unsupported_features_are_refused_by_name(lab, edit, config, reason):
    with pytest.raises(UnusableAdapter, match=reason):
        load(lab, edit(**config))


def test_the_layout_has_no_hole_that_is_not_alignment(lab, plain):
    header, payload = read_checkpoint(plain, lab.spec, LoadOptions(dtype="bfloat16"))
    assert payload.size == header.num_bytes
    end = 0
    for module in header.modules:
        for offset, columns in (
            (module.offset_a, module.in_features),
            (module.offset_b, module.out_features),
        ):
            assert offset % 64 == 0
            assert 0 <= offset - end < 64
            end = offset + module.rank * columns * 2
    assert load(lab, plain, "bfloat16").nbytes == header.num_bytes


def test_a_payload_above_the_limit_is_too_large(lab, plain):
    with pytest.raises(TooLarge, match="host memory"):
        load(lab, plain, max_payload_bytes=1000)


def test_a_file_above_the_limit_is_too_large(lab, plain):
    with pytest.raises(TooLarge, match="at most 1000"):
        load(lab, plain, limits=AdapterLimits(max_weights_bytes=1000))


# Identity


def test_the_digest_is_the_manifests(lab, plain):
    assert load(lab, plain).digest == build_manifest(plain).digest


def test_other_content_than_the_digest_stands_for_is_refused(lab, edit):
    folder = edit()
    digest = build_manifest(folder).digest

    def read():
        return LoRAModel.from_local_checkpoint(
            folder, lab.spec, lab.options, lora_model_id=1, expected_digest=digest
        )

    assert read().digest == digest
    edit(lambda tensors: tensors[Q_A].add_(1))
    with pytest.raises(ManifestMismatch):
        read()


def test_the_folders_own_manifest_is_held_to(lab, edit):
    folder = edit()
    (folder / MANIFEST_FILE).write_bytes(build_manifest(folder).to_json())
    assert load(lab, folder).loras
    edit(lambda tensors: tensors[Q_A].add_(1))
    with pytest.raises(ManifestMismatch):
        load(lab, folder)


def test_a_link_out_of_the_folder_is_followed_only_for_proven_content(lab, edit, tmp_path):
    folder = edit()
    outside = tmp_path / "outside"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)
    with pytest.raises(UnusableAdapter, match="leads out"):
        load(lab, folder)
    digest = build_manifest(folder, within=tmp_path).digest
    model = LoRAModel.from_local_checkpoint(
        folder, lab.spec, lab.options, lora_model_id=1, expected_digest=digest
    )
    assert model.digest == digest


# Copies of the base's tensors


@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_base_is_taken_only_if_equal(labs, base, served):
    lab = labs[base]
    folder = lab.write(target_modules=["embed_tokens", "lm_head"]).path
    assert any("base_layer" in key for key in load_file(folder / WEIGHTS))
    digests = BaseDigests(lab.model(served).base_weight)
    dtype: WeightDType = "float32" if served is torch.float32 else "bfloat16"
    options = LoadOptions(dtype=dtype)

    def read():
        return LoRAModel.from_local_checkpoint(
            folder, lab.spec, options, lora_model_id=1, base_digest=digests
        )

    assert read().loras.keys() == {"model.embed_tokens", "lm_head"}
    with pytest.raises(UnusableAdapter, match="replaces a weight of the base"):
        LoRAModel.from_local_checkpoint(folder, lab.spec, options, lora_model_id=1)
    tensors = load_file(folder / WEIGHTS)
    changed = next(key for key in tensors if "base_layer" in key)
    tensors[changed][3, 4] += 1
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UnusableAdapter, match="base_layer"):
        read()


# Pickles


@pytest.fixture
def pickled(edit):
    folder = edit()
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    return folder


def test_a_pickle_is_read_only_where_admitted(lab, pickled, plain):
    with pytest.raises(UnusableAdapter, match="pickle"):
        load(lab, pickled)
    model = load(lab, pickled, limits=AdapterLimits(admit_bin=True))
    for name, weights in load(lab, plain).loras.items():
        assert torch.equal(weights.lora_a, model.loras[name].lora_a)
        assert torch.equal(weights.lora_b, model.loras[name].lora_b)


TRACE = Path(tempfile.gettempdir()) / "mural-test-a-pickle-was-run"


class Payload:
    """Unpickling it with pickle's full power would create a file."""

    def __reduce__(self):
        return (open, (str(TRACE), "w"))


@pytest.mark.parametrize("content", [Payload(), {"x": Payload()}, [1, 2], {"x": 3}, None])
def test_a_pickle_that_is_no_map_of_tensors_is_refused(lab, pickled, content, tmp_path):
    if content is None:
        (pickled / "adapter_model.bin").write_bytes(b"\x80\x04 no pickle at all")
    else:
        torch.save(content, pickled / "adapter_model.bin")
    with pytest.raises(UnusableAdapter, match=r"adapter_model\.bin"):
        load(lab, pickled, limits=AdapterLimits(admit_bin=True))
    assert not TRACE.exists()


def test_a_pickle_of_quantised_numbers_is_refused(lab, pickled):
    torch.save({Q_A: torch.ones(4, 48, dtype=torch.int8)}, pickled / "adapter_model.bin")
    with pytest.raises(UnusableAdapter, match=r"torch\.int8"):
        load(lab, pickled, limits=AdapterLimits(admit_bin=True))


# Whatever else somebody may upload


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mutated_folders_are_refused_with_a_reason_or_read_right(lab, plain, tmp_path, data):
    folder = tmp_path / "mutated"
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    name = data.draw(st.sampled_from([WEIGHTS, "adapter_config.json"]))
    content = bytearray((plain / name).read_bytes())
    # The header is where a file can lie; the numbers behind it are only numbers.
    last = len(content) if name != WEIGHTS else 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, last - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "digit"])):
            case "flip":
                content[at % len(content)] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 400))]
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=40))
            case "digit":
                content[at % len(content)] = data.draw(st.sampled_from(b'0123456789-{}[]",'))
        last = max(1, min(last, len(content)))
        content = content or bytearray(1)
    (folder / name).write_bytes(content)
    refusal = None
    try:
        model = load(lab, folder)
    except MuralError as error:
        refusal = error
    if refusal is None:
        for weights in model.loras.values():
            assert weights.lora_a.isfinite().all()
            assert weights.lora_b.isfinite().all()
    else:
        assert 400 <= refusal.status < 500
        assert refusal.message.isprintable()
        assert len(refusal.message) < 2000
