"""The index tensors of a step, and when they are worked out anew."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mural_server.lora.mapping import ChunkMapping, LoRAMapping
from mural_server.lora.punica import LoRAKernelMeta
from mural_server.lora.worker_manager import LRUCacheWorkerLoRAManager

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj"


@given(st.lists(st.integers(-1, 3), max_size=20))
def test_the_five_tensors_describe_the_rows(slots):
    meta = LoRAKernelMeta(max_rows=20, max_loras=4, device=CPU)
    meta.prepare_tensors(torch.full((20,), 3))  # what a former step left must not show through
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.int64))
    assert meta.token_lora_mapping.tolist() == slots + [-1] * (20 - len(slots))
    assert meta.no_lora == all(slot == -1 for slot in slots)
    if meta.no_lora:
        assert meta.num_active == 0
        return
    present = sorted(set(slots))
    assert meta.num_active == len(present)
    assert meta.active_lora_ids.tolist() == present + [-1] * (5 - len(present))
    order = sorted(range(len(slots)), key=lambda row: slots[row])
    assert meta.token_indices_sorted_by_lora_ids[: len(slots)].tolist() == order
    start = 0
    for index, slot in enumerate(present):
        assert meta.num_tokens_per_lora[index] == slots.count(slot)
        assert meta.lora_token_start_loc[index] == start
        start += slots.count(slot)
    assert meta.lora_token_start_loc[len(present)] == len(slots)


def test_the_tensors_keep_their_addresses():
    meta = LoRAKernelMeta(8, 2, CPU)
    before = [
        tensor.data_ptr() for tensor in vars(meta).values() if isinstance(tensor, torch.Tensor)
    ]
    assert len(before) == 5
    meta.prepare_tensors(torch.tensor([1, 0, -1]))
    assert before == [
        tensor.data_ptr() for tensor in vars(meta).values() if isinstance(tensor, torch.Tensor)
    ]


def test_metadata_is_kept_while_rows_and_slots_stay(lab, make_model):
    manager = lab.manager()
    worker = LRUCacheWorkerLoRAManager(manager)
    worker.add_adapter(make_model(lab.spec, 1, 2, [Q]))
    mapping = LoRAMapping(decode_ids=(1, 0), sampled_ids=(1, 0))
    worker.set_active_adapters({1}, mapping)
    assert not manager.set_adapter_mapping(mapping)
    assert manager.set_adapter_mapping(LoRAMapping(decode_ids=(0, 1), sampled_ids=(1, 0)))


def test_metadata_is_refreshed_when_the_slot_changed_under_the_same_rows(lab, make_model):
    manager = lab.manager(max_loras=2)
    worker = LRUCacheWorkerLoRAManager(manager)
    for lora_id in (1, 2):
        worker.add_adapter(make_model(lab.spec, lora_id, 2, [Q]))
    mapping = LoRAMapping(decode_ids=(1,), sampled_ids=(1,))
    worker.set_active_adapters({1}, mapping)
    assert manager.punica.token_meta.token_lora_mapping[0] == 0
    # Out of band: 1 loses its slot, 2 takes it, and 1 comes back to another.
    manager.deactivate_adapter(1)
    manager.activate_adapter(2)
    worker.set_active_adapters({1}, mapping)
    assert manager.punica.token_meta.token_lora_mapping[0] == 1
    assert manager.punica.active_slots == 0b10


def test_metadata_is_refreshed_when_only_the_rank_rows_changed(lab, make_model):
    manager = lab.manager(max_loras=2)
    for lora_id, rank in ((1, 2), (2, 5)):
        manager.add_adapter(make_model(lab.spec, lora_id, rank, [Q]))
    mapping = LoRAMapping(decode_ids=(1,), sampled_ids=(1,))
    manager.activate_adapter(2)
    manager.activate_adapter(1)
    assert manager.set_adapter_mapping(mapping)
    before = manager.slot_of[1]
    manager.deactivate_adapter(2)
    manager.deactivate_adapter(1)
    manager.add_adapter(make_model(lab.spec, 3, 1, [Q]))
    manager.activate_adapter(3)
    manager.activate_adapter(1)
    assert manager.slot_of[1] == before
    assert manager.set_adapter_mapping(mapping)


def test_rows_of_no_adapter_take_no_work(lab, make_model):
    manager = lab.manager()
    manager.set_adapter_mapping(LoRAMapping(decode_ids=(0, 0), chunks=(ChunkMapping(5, 0),)))
    assert manager.punica.active_slots == 0
    assert manager.punica.token_meta.no_lora


def test_sampled_rows_may_be_taken_up_on_their_own(lab, make_model):
    manager = lab.manager()
    manager.add_adapter(make_model(lab.spec, 1, 2, ["lm_head"]))
    manager.activate_adapter(1)
    mapping = LoRAMapping(decode_ids=(1,), sampled_ids=(1,))
    manager.set_adapter_mapping(mapping)
    manager.set_logits_mapping((0, 0, 1))
    assert manager.punica.logits_meta.token_lora_mapping[:3].tolist() == [-1, -1, 0]
    assert manager.set_adapter_mapping(mapping)
