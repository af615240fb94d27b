"""Both tiers: who is where, who goes, who never goes, and what is told and freed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mural_resolvers.errors import Conflict, TooLarge, Unavailable, UnusableAdapter
from mural_server.layers.linear import LinearBase
from mural_server.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from mural_server.lora.manager import AdapterInUse, FreedAdapterBytes, LoRAModelManager
from mural_server.lora.mapping import ChunkMapping, LoRAMapping
from mural_server.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

LAYER = "model.layers.0.self_attn"
Q, K, UP = f"{LAYER}.q_proj", f"{LAYER}.k_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture
def manager(lab):
    return lab.manager()


@pytest.fixture
def add(lab, make_model, manager):
    def add_to(lora_id, rank=2, modules=(Q, UP), tenant="", nbytes=None):
        model = make_model(lab.spec, lora_id, rank, modules, nbytes=nbytes)
        manager.add_adapter(model, tenant=tenant)
        return model

    return add_to


# Wrapping


def test_every_target_is_wrapped_once_and_lm_head_at_its_logits_processor(lab, manager):
    assert set(manager.modules) == {
        "model.embed_tokens",
        "lm_head",
        *(
            f"model.layers.{layer}.{part}"
            for layer in range(2)
            for part in (
                "self_attn.qkv_proj",
                "self_attn.o_proj",
                "mlp.gate_up_proj",
                "mlp.down_proj",
            )
        ),
    }
    assert isinstance(manager.model.logits_processor, LogitsProcessorWithLoRA)
    wrapped = {id(module.base_layer) for module in manager.modules.values()}
    for name, module in manager.model.named_modules():
        if isinstance(module, LinearBase) and "lm_head" not in name:
            assert id(module) in wrapped
            assert name.endswith("base_layer")


def test_only_the_chosen_targets_are_wrapped(lab):
    manager = lab.manager(target_modules=("q_proj", "down_proj"))
    assert {name.rpartition(".")[2] for name in manager.modules} == {"qkv_proj", "down_proj"}
    assert not isinstance(manager.model.logits_processor, BaseLayerWithLoRA)
    with pytest.raises(ValueError, match="match no module"):
        lab.manager(target_modules=("none_such",))


def test_a_module_with_two_names_has_one_wrapper(lab):
    model = lab.model()
    shared = model.model.layers[0].mlp.down_proj
    model.model.layers[1].mlp.alias = nn.Module()
    model.model.layers[1].mlp.alias.down_proj = shared
    spec = lab.spec
    spec.modules["model.layers.1.mlp.alias.down_proj"] = spec.modules[
        "model.layers.0.mlp.down_proj"
    ]
    try:
        manager = LoRAModelManager(
            model,
            spec,
            lab.manager().config,
            model.ops,
            packed_modules_mapping=model.packed_modules_mapping,
            max_rows=8,
        )
    finally:
        del spec.modules["model.layers.1.mlp.alias.down_proj"]
    wrapper = model.model.layers[0].mlp.down_proj
    assert isinstance(wrapper, BaseLayerWithLoRA)
    assert model.model.layers[1].mlp.alias.down_proj is wrapper
    assert list(manager.modules.values()).count(wrapper) == 1


# Registering


def test_adding_twice_changes_nothing(lab, make_model, manager):
    model = make_model(lab.spec, 1, 2, [Q])
    assert manager.add_adapter(model)
    assert not manager.add_adapter(model)
    assert manager.host_bytes == model.nbytes


def test_what_does_not_fit_is_refused_before_anyone_is_evicted(lab, make_model, manager, add):
    for lora_id in range(1, 7):
        add(lora_id)
    before = manager.list_adapters()
    bad = [
        make_model(lab.spec, 9, 2, []),
        make_model(lab.spec, 9, 9, [Q]),
    ]
    wrong = make_model(lab.spec, 9, 2, [Q])
    wrong.loras[Q].lora_a.resize_(1, 1)
    renamed = make_model(lab.spec, 9, 2, [Q])
    renamed.loras["model.layers.7.self_attn.q_proj"] = renamed.loras.pop(Q)
    for model in (*bad, wrong, renamed):
        with pytest.raises(UnusableAdapter):
            manager.add_adapter(model)
    assert manager.list_adapters() == before


def test_a_model_of_another_dtype_is_refused(lab, make_model, manager):
    model = make_model(lab.spec, 1, 2, [Q])
    half = type(model)(
        1,
        2,
        {
            Q: type(model.loras[Q])(
                Q, 2, 1.0, model.loras[Q].lora_a.half(), model.loras[Q].lora_b.half()
            )
        },
        8,
    )
    with pytest.raises(UnusableAdapter, match="do not fit"):
        manager.add_adapter(half)


def test_a_full_plain_manager_refuses_and_evicts_nobody(lab, make_model):
    manager = lab.manager(lru=False, max_loras=1, max_cpu_loras=2)
    for lora_id in (1, 2):
        manager.add_adapter(make_model(lab.spec, lora_id, 2, [Q]))
    with pytest.raises(Unavailable) as refused:
        manager.add_adapter(make_model(lab.spec, 3, 2, [Q]))
    assert refused.value.retry_after_s
    manager.activate_adapter(1)
    with pytest.raises(Unavailable):
        manager.activate_adapter(2)
    assert list(manager.list_adapters()) == [2, 1]


# Least recently used


def test_each_tier_gives_its_oldest(manager, add):
    for lora_id in range(1, 7):
        add(lora_id)
    for lora_id in (1, 2, 3):
        manager.activate_adapter(lora_id)
    manager.touch_active(1)
    manager.activate_adapter(4)
    assert manager.slot_of.keys() == {1, 3, 4}
    add(7)  # the oldest registered is 5: 1 to 4 have been used since
    assert set(manager.list_adapters()) == {1, 2, 3, 4, 6, 7}
    manager.check_integrity()


def test_the_rows_of_a_step_count_as_use(manager, add):
    for lora_id in range(1, 4):
        add(lora_id)
        manager.activate_adapter(lora_id)
    manager.set_adapter_mapping(LoRAMapping(decode_ids=(1,)))
    add(4)
    manager.activate_adapter(4)
    assert manager.slot_of.keys() == {1, 3, 4}


def test_what_leaves_host_memory_leaves_its_slot(manager, add):
    for lora_id in range(1, 7):
        add(lora_id)
    manager.activate_adapter(1)
    for lora_id in range(2, 7):
        manager.add_adapter(manager.get_adapter(lora_id))  # touched
    add(7)
    assert not manager.is_active(1)
    assert manager.get_adapter(1) is None
    manager.check_integrity()


def test_pinned_adapters_stay_in_both_tiers(manager, add):
    add(1)
    manager.pin_adapter(1)
    for lora_id in range(2, 10):
        add(lora_id)
        manager.activate_adapter(lora_id)
    assert manager.is_active(1)
    manager.unpin_adapter(1)
    for lora_id in range(10, 16):
        add(lora_id)
        manager.activate_adapter(lora_id)
    assert manager.get_adapter(1) is None


def test_a_host_pin_leaves_the_slot_to_others(manager, add):
    add(1)
    manager.pin_adapter(1, "host")
    assert not manager.is_active(1)
    for lora_id in range(2, 10):
        add(lora_id)
        manager.activate_adapter(lora_id)
    assert manager.get_adapter(1) is not None
    assert manager.is_pinned(1)
    assert not manager.is_pinned(1, "slot")


def test_pins_leave_a_slot_to_the_others(manager, add):
    for lora_id in (1, 2, 3):
        add(lora_id)
    manager.pin_adapter(1)
    manager.pin_adapter(2)
    with pytest.raises(Conflict, match="2 of 3 slots"):
        manager.pin_adapter(3)
    manager.pin_adapter(2)
    with pytest.raises(KeyError):
        manager.pin_adapter(9)


def test_host_pins_leave_a_place_to_the_others(manager, add):
    limit = manager.config.max_cpu_loras
    for lora_id in range(1, limit + 1):
        add(lora_id)
    for lora_id in range(1, limit):
        manager.pin_adapter(lora_id, "host")
    with pytest.raises(Conflict, match=f"{limit - 1} of {limit} adapters"):
        manager.pin_adapter(limit, "host")
    manager.pin_adapter(1, "host")
    add(limit + 1)
    assert manager.get_adapter(limit) is None


def test_a_pin_can_be_taken_from_the_slot_alone(manager, add):
    add(1)
    manager.pin_adapter(1)
    manager.unpin_adapter(1, "slot")
    assert (manager.is_pinned(1), manager.is_pinned(1, "slot")) == (True, False)


def test_in_use_adapters_stay_in_host_memory(manager, add):
    for lora_id in range(1, 7):
        add(lora_id)
    manager.set_in_use({1, 2, 3, 4, 5, 6})
    with pytest.raises(Unavailable, match="none of them can be evicted"):
        add(7)
    manager.set_in_use({1, 2, 3, 5, 6})
    add(7)
    assert 4 not in manager.list_adapters()


def test_a_preload_takes_no_slot_of_the_running_step(manager, add):
    worker = LRUCacheWorkerLoRAManager(manager)
    for lora_id in range(1, 5):
        add(lora_id)
    worker.set_active_adapters({1, 2, 3}, LoRAMapping(decode_ids=(1, 2, 3)))
    manager.set_in_use({1, 2, 3})
    with pytest.raises(Unavailable):
        manager.activate_adapter(4)
    # The next step may do without one of them: its request is paused, not gone.
    worker.set_active_adapters({2, 3, 4}, LoRAMapping(decode_ids=(2, 3, 4)))
    assert manager.slot_of.keys() == {2, 3, 4}


# Shares


def test_the_tenant_most_over_its_share_gives_its_oldest(manager, add):
    add(1, tenant="small", nbytes=10)
    for lora_id in (2, 3, 4):
        add(lora_id, tenant="large", nbytes=40)
    for lora_id in (5, 6):
        add(lora_id, tenant="middle", nbytes=30)
    add(7, tenant="small", nbytes=10)
    assert 2 not in manager.list_adapters()
    add(8, tenant="middle", nbytes=30)
    assert 5 not in manager.list_adapters()


def test_a_byte_budget_evicts_as_many_as_it_takes_and_none_in_vain(lab, make_model):
    manager = lab.manager(max_cpu_lora_bytes=100)
    for lora_id in (1, 2, 3):
        manager.add_adapter(make_model(lab.spec, lora_id, 2, [Q], nbytes=30))
    manager.add_adapter(make_model(lab.spec, 4, 2, [Q], nbytes=60))
    assert set(manager.list_adapters()) == {3, 4}
    with pytest.raises(TooLarge, match="101 bytes"):
        manager.add_adapter(make_model(lab.spec, 5, 2, [Q], nbytes=101))
    manager.set_in_use({4})
    with pytest.raises(Unavailable):
        manager.add_adapter(make_model(lab.spec, 5, 2, [Q], nbytes=50))
    assert set(manager.list_adapters()) == {3, 4}
    manager.check_integrity()


# Clones and removal


def test_a_clone_shares_tensors_and_takes_host_memory_once(manager, add):
    model = add(1)
    clone = model.clone(2)
    manager.add_adapter(clone)
    assert clone.loras[Q].lora_a.data_ptr() == model.loras[Q].lora_a.data_ptr()
    assert manager.host_bytes == model.nbytes
    assert manager.remove_adapter(1) == FreedAdapterBytes(slot=0, host=0)
    assert manager.remove_adapter(2) == FreedAdapterBytes(slot=0, host=model.nbytes)
    assert manager.remove_adapter(2) == FreedAdapterBytes(slot=0, host=0)


def test_a_removal_frees_both_tiers_and_says_so(manager, add):
    model = add(1, rank=3)
    manager.activate_adapter(1)
    used = manager.slot_bytes
    assert used == 3 * sum(
        manager.modules[layer].stack.bytes_per_rank_row
        for layer in (f"{LAYER}.qkv_proj", "model.layers.1.mlp.gate_up_proj")
    )
    assert manager.remove_adapter(1) == FreedAdapterBytes(slot=used, host=model.nbytes)
    assert manager.slot_bytes == manager.host_bytes == 0
    manager.check_integrity()


def test_what_is_in_use_is_not_removed(manager, add):
    add(1)
    manager.set_in_use({1})
    with pytest.raises(AdapterInUse):
        manager.remove_adapter(1)
    assert manager.get_adapter(1) is not None


# Steps


def test_more_adapters_than_slots_is_an_error_and_changes_nothing(manager, add):
    worker = LRUCacheWorkerLoRAManager(manager)
    for lora_id in range(1, 6):
        add(lora_id)
    worker.set_active_adapters({1, 2}, LoRAMapping(decode_ids=(1, 2)))
    with pytest.raises(ValueError, match="4 adapters"):
        worker.set_active_adapters({2, 3, 4, 5}, LoRAMapping(decode_ids=(2, 3, 4, 5)))
    manager.pin_adapter(1)
    with pytest.raises(ValueError, match="pinned"):
        worker.set_active_adapters({2, 3, 4}, LoRAMapping(decode_ids=(2, 3, 4)))
    with pytest.raises(ValueError, match="without a slot"):
        worker.set_active_adapters({2}, LoRAMapping(chunks=(ChunkMapping(3, 5),)))
    with pytest.raises(KeyError):
        worker.set_active_adapters({9}, LoRAMapping(decode_ids=(9,)))
    assert manager.slot_of.keys() == {1, 2}


def test_the_plain_worker_empties_what_a_step_does_not_need(lab, make_model):
    manager = lab.manager(lru=False)
    worker = WorkerLoRAManager(manager)
    for lora_id in (1, 2, 3, 4):
        worker.add_adapter(make_model(lab.spec, lora_id, 2, [Q]))
    assert worker.set_active_adapters({1, 2, 3}, LoRAMapping(decode_ids=(1, 2, 3))) == 3
    assert worker.set_active_adapters({4}, LoRAMapping(decode_ids=(4,))) == 1
    assert manager.slot_of.keys() == {4}
    manager.check_integrity()


def test_a_step_never_evicts_its_own_adapters(manager, add):
    worker = LRUCacheWorkerLoRAManager(manager)
    for lora_id in range(1, 7):
        add(lora_id)
    worker.set_active_adapters({1, 2, 3}, LoRAMapping(decode_ids=(1, 2, 3)))
    # 1 is the oldest in a slot and is needed again beside two new ones.
    assert worker.set_active_adapters({1, 4, 5}, LoRAMapping(decode_ids=(1, 4, 5))) == 2
    assert manager.slot_of.keys() == {1, 4, 5}


def test_a_row_without_an_adapter_is_left_bit_for_bit(lab, make_model, run_prefill, map_prompts):
    prompts = [[5, 6, 7], [8, 9]]
    plain = run_prefill(lab.model(), prompts)
    manager = lab.manager()
    worker = LRUCacheWorkerLoRAManager(manager)
    every = list(lab.spec.modules)
    worker.add_adapter(make_model(lab.spec, 1, 8, every))
    worker.set_active_adapters({1}, map_prompts(prompts, [0, 1]))
    mixed = run_prefill(manager.model, prompts)
    assert torch.equal(mixed[:3], plain[:3])
    assert not torch.allclose(mixed[3:], plain[3:])


def test_a_slot_shows_nothing_of_its_former_adapter(lab, make_model, run_prefill, map_prompts):
    prompts = [[5, 6, 7], [8, 9]]
    every = list(lab.spec.modules)
    small = make_model(lab.spec, 2, 3, [K])

    def answer(manager):
        worker = LRUCacheWorkerLoRAManager(manager)
        worker.add_adapter(small)
        worker.set_active_adapters({2}, map_prompts(prompts, [2, 2]))
        return run_prefill(manager.model, prompts)

    fresh = answer(lab.manager(max_loras=1))
    used = lab.manager(max_loras=1)
    LRUCacheWorkerLoRAManager(used).add_adapter(make_model(lab.spec, 1, 8, every), tier="slot")
    assert torch.equal(answer(used), fresh)


def test_an_overflow_in_one_adapter_leaves_the_others_alone(
    lab, make_model, run_prefill, map_prompts
):
    prompts = [[5, 6, 7], [8, 9]]
    good, huge = make_model(lab.spec, 1, 4, [Q, UP]), make_model(lab.spec, 2, 4, [Q, UP])
    for weights in huge.loras.values():
        weights.lora_a.fill_(3e38)
    answers = []
    for others in ([], [huge]):
        manager = lab.manager()
        worker = LRUCacheWorkerLoRAManager(manager)
        for model in (good, *others):
            worker.add_adapter(model)
        lora_ids = [1, 2 if others else 0]
        worker.set_active_adapters(set(lora_ids) - {0}, map_prompts(prompts, lora_ids))
        answers.append(run_prefill(manager.model, prompts)[:3])
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)
