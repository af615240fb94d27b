"""Random use of a manager: the tiers agree, and every slot holds exactly its adapter's weights."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mural_resolvers.errors import Conflict, Unavailable
from mural_server.lora.manager import AdapterInUse
from mural_server.lora.mapping import LoRAMapping
from mural_server.lora.worker_manager import LRUCacheWorkerLoRAManager

TENANTS = ("acme", "globex", "initech")


def assert_slots_hold_their_adapters(manager) -> None:
    """Compare the rank rows of every slot with the weights of its adapter."""
    for lora_id, slot in manager.slot_of.items():
        start, end = manager._rank_rows.blocks[slot]
        layers = manager.get_adapter(lora_id).packed(manager._packed_modules_mapping)
        for name, module in manager.modules.items():
            weights = layers.get(name)
            slices = weights.slices if weights else (None,) * module.stack.num_slices
            for index, pair in enumerate(slices):
                a, b = module.stack.a[index, start:end], module.stack.b[index][start:end]
                rank = 0 if pair is None else pair.rank
                if pair is not None:
                    assert torch.equal(a[:rank], pair.lora_a), (lora_id, name)
                    assert torch.equal(b[:rank], pair.lora_b), (lora_id, name)
                # The rest adds exactly nothing: one half is zero, the other finite.
                assert not (a[rank:].any() and b[rank:].any()), (lora_id, name)
                assert a.isfinite().all()
                assert b.isfinite().all()


@pytest.fixture(scope="module")
def models(lab, make_model):
    """Sixteen adapters of every rank, over random modules."""
    chance = random.Random(5)
    names = list(lab.spec.modules)
    return {
        lora_id: make_model(
            lab.spec, lora_id, chance.randint(1, 8), chance.sample(names, chance.randint(1, 9))
        )
        for lora_id in range(1, 17)
    }


STEP = st.tuples(
    st.sampled_from(["add", "add", "step", "step", "pin", "unpin", "remove", "use", "preload"]),
    st.lists(st.integers(1, 16), min_size=1, max_size=4),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEP, min_size=5, max_size=60), budget=st.sampled_from([None, 60_000]))
def test_tiers_agree_and_slots_hold_their_adapters_weights(lab, models, steps, budget):
    manager = lab.manager(max_cpu_lora_bytes=budget)
    worker = LRUCacheWorkerLoRAManager(manager)
    for action, ids in steps:
        first = ids[0]
        registered = manager.list_adapters()
        pinned = {i for i in registered if manager.is_pinned(i)}
        in_use = set(manager._in_use)
        try:
            if action == "add":
                worker.add_adapter(models[first], tenant=TENANTS[first % 3])
            elif action == "preload":
                worker.add_adapter(models[first], tenant=TENANTS[first % 3], tier="slot")
            elif action == "step":
                needed = {i for i in ids if i in registered}
                worker.set_active_adapters(needed, LoRAMapping(decode_ids=(0, *sorted(needed))))
                assert needed <= manager.slot_of.keys()
                rows = manager.punica.token_meta.token_lora_mapping[: len(needed) + 1].tolist()
                assert rows == [-1, *(manager.slot_of[i] for i in sorted(needed))]
            elif action == "pin" and first in registered:
                manager.pin_adapter(first, "slot" if len(ids) % 2 else "host")
            elif action == "unpin":
                manager.unpin_adapter(first)
            elif action == "remove":
                manager.remove_adapter(first)
                assert first not in manager.list_adapters()
            elif action == "use":
                manager.set_in_use([i for i in ids if i in registered])
        except (Unavailable, Conflict, AdapterInUse, ValueError):
            pass  # a full tier says so and changes nothing that the checks below would not see
        manager.check_integrity()
        assert_slots_hold_their_adapters(manager)
        if action not in ("remove", "unpin"):
            assert pinned | (in_use & registered.keys()) <= manager.list_adapters().keys()
