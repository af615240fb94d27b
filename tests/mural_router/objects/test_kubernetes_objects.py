"""Objects from watches that a test plays."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest

from mural_resolvers.errors import MuralError, Unauthorized, Unavailable
from mural_resolvers.kubernetes.tenants import keys_json
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import KeyRecord, mint_key
from mural_router.objects import kubernetes as module
from mural_router.objects.kubernetes import KubernetesObjects
from mural_router.routing.identity import Authenticator

NOW = datetime(2027, 1, 1, tzinfo=UTC)
KEY, INLINE = mint_key(), mint_key()
API = "/apis/mural.dev/v1alpha1"
TENANTS = f"{API}/namespaces/mural/tenants"
SECRETS = "/api/v1/namespaces/mural/secrets"
STABLE = parse_name("acme:stable")


class Client:
    namespace = "mural"


class PlayedWatch:
    """A `Watch` whose API server is the test."""

    all: ClassVar[dict[str, PlayedWatch]] = {}

    def __init__(
        self,
        client: Client,
        path: str,
        decode: Callable[[bytes], Any],
        *,
        what: str,
        **selectors: Any,
    ) -> None:
        self.selectors = selectors
        self.objects: dict[str, Any] = {}
        self.invalid: dict[str, str] = {}
        self.synced = self.fresh = False
        self.trouble = ""
        self._decode = decode
        self.all[path] = self

    async def run(self, changed: Callable[[str | None], None]) -> None:
        self.changed = changed
        await asyncio.Event().wait()

    def list(self, *objects: dict[str, Any]) -> None:
        self.objects.clear()
        self.invalid.clear()
        for each in objects:
            self._take(each)
        self.synced = self.fresh = True
        self.changed(None)

    def put(self, each: dict[str, Any]) -> None:
        self.changed(self._take(each))

    def remove(self, key: str) -> None:
        self.objects.pop(key, None)
        self.invalid.pop(key, None)
        self.changed(key)

    def lose(self) -> None:
        self.fresh, self.trouble = False, "nobody answers"
        self.changed(None)

    def _take(self, each: dict[str, Any]) -> str:
        key = f"{each['metadata']['namespace']}/{each['metadata']['name']}"
        self.objects.pop(key, None)
        self.invalid.pop(key, None)
        try:
            self.objects[key] = self._decode(json.dumps(each).encode())
        except (MuralError, ValueError) as error:
            self.invalid[key] = str(error)
        return key


class Played:
    """Running objects, and their watches."""

    def __init__(self, **more: Any) -> None:
        self.objects = KubernetesObjects(Client(), keys_secret="the-keys", **more)  # type: ignore[arg-type]  # a played one
        self.auth = Authenticator("keys", admin_keys=["admin"], tenants=self.objects)
        self.task = asyncio.create_task(self.objects.run())

    async def begin(self) -> None:
        await turns()

    def watch(self, path: str) -> PlayedWatch:
        return PlayedWatch.all[path]

    async def all_listed(self, *tenants: dict[str, Any], keys: bool = True) -> None:
        await turns()
        self.watch(TENANTS).list(*tenants)
        self.watch(SECRETS).list(*([secret(acme=KEY)] if keys else []))
        for path, watch in PlayedWatch.all.items():
            if path not in (TENANTS, SECRETS):
                watch.list()
        await turns()

    def asks(self, key: str) -> str | None:
        return self.auth.principal((f"Bearer {key}",)).tenant

    def refuses(self, key: str) -> bool:
        try:
            self.asks(key)
        except Unauthorized:
            return True
        return False

    def state(self, kind: str) -> Any:
        return next(each for each in self.objects.states() if each.kind == kind)


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.fixture
async def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "Watch", PlayedWatch)
    PlayedWatch.all = {}
    played: list[Played] = []

    def start(**more: Any) -> Played:
        played.append(Played(**more))
        return played[-1]

    yield start
    for each in played:
        each.task.cancel()
        await asyncio.gather(each.task, return_exceptions=True)


def thing(name: str, namespace: str = "mural", **spec: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "creationTimestamp": NOW.isoformat()}
    return {"metadata": meta, "spec": spec}


def acme(*namespaces: str, **more: Any) -> dict[str, Any]:
    keys = [{"secretRef": {"name": "acme", "key": "key"}}]
    return thing("acme", namespaces=namespaces or ("mural",), **({"keys": keys} | more))


def secret(**keys: Any) -> dict[str, Any]:
    text = keys_json({t: [KeyRecord(key.key_id, key.sha256)] for t, key in keys.items()})
    return secret_of({"keys.json": base64.b64encode(text).decode()})


def secret_of(data: dict[str, str] | None) -> dict[str, Any]:
    return {"metadata": {"name": "the-keys", "namespace": "mural"}, "data": data}


def entries(content: dict[str, Any]) -> dict[str, str]:
    return {"keys.json": base64.b64encode(json.dumps(content).encode()).decode()}


def alias(version: str, namespace: str = "mural") -> dict[str, Any]:
    return thing(
        "stable", namespace, tenant="acme", alias="stable", versions=[{"version": version}]
    )


def adapter(replicas: int, namespace: str = "mural", name: str = "v1") -> dict[str, Any]:
    return thing(
        name,
        namespace,
        pool="main",
        tenant="acme",
        version=name,
        placement={"replicas": replicas},
    )


async def test_only_the_one_secret_is_asked_for_and_only_what_is_watched(play):
    played = play()
    await played.begin()
    assert set(PlayedWatch.all) == {
        TENANTS,
        SECRETS,
        f"{API}/namespaces/mural/adapters",
        f"{API}/namespaces/mural/adapteraliases",
    }
    assert played.watch(SECRETS).selectors == {"field_selector": "metadata.name=the-keys"}


async def test_several_namespaces_are_watched_or_all_at_once(play):
    play(watched=("a", "b", "a"), namespace="mural")
    kinds = ("adapters", "adapteraliases")
    paths = {f"{API}/namespaces/{at}/{kind}" for at in "ab" for kind in kinds}
    assert set(PlayedWatch.all) == {TENANTS, SECRETS} | paths
    PlayedWatch.all = {}
    play(watched=("*",))
    assert set(PlayedWatch.all) == {TENANTS, SECRETS} | {f"{API}/{kind}" for kind in kinds}


async def test_until_all_is_known_a_tenants_key_is_neither_good_nor_bad(play):
    played = play()
    await played.begin()
    for path in (*PlayedWatch.all,):
        assert "not known yet" in played.objects.not_ready()
        with pytest.raises(Unavailable):
            played.asks(KEY.key)
        assert played.asks("admin") is None, "an admin's key is no object"
        played.watch(path).list(*([secret(acme=KEY)] if path == SECRETS else []))
    await turns()
    assert played.objects.not_ready() is None
    assert played.refuses(KEY.key)
    played.watch(TENANTS).put(acme())
    await turns()
    assert played.asks(KEY.key) == "acme"


async def test_a_secret_that_nobody_has_written_yet_is_waited_for_but_not_for_ever(
    play, monkeypatch
):
    played = play()
    await played.all_listed(acme(), keys=False)
    assert "keys are not known" in played.objects.not_ready()
    monkeypatch.setattr(module, "SECRET_WAIT_S", 0.0)
    assert played.objects.not_ready() is None
    assert played.refuses(KEY.key)
    monkeypatch.setattr(module, "SECRET_WAIT_S", 30.0)
    assert played.refuses(KEY.key), "once they were known they are"


async def test_a_key_in_the_object_itself_needs_no_secret(play):
    played = play()
    keys = [{"id": INLINE.key_id, "sha256": INLINE.sha256}]
    await played.all_listed(acme(keys=keys), keys=False)
    assert played.objects.not_ready() is None
    assert played.asks(INLINE.key) == "acme"
    played.watch(TENANTS).put(acme(keys=[]))
    await turns()
    assert played.refuses(INLINE.key)


async def test_a_revoked_key_stops_at_once_and_so_does_a_deleted_tenants(play):
    played = play()
    await played.all_listed(acme())
    assert played.asks(KEY.key) == "acme"
    other = mint_key()
    played.watch(SECRETS).put(secret(acme=other))
    await turns()
    assert played.refuses(KEY.key)
    assert played.asks(other.key) == "acme"
    played.watch(TENANTS).remove("mural/acme")
    await turns()
    assert played.refuses(other.key)


async def test_a_spoilt_secret_leaves_the_last_good_keys_and_a_deleted_one_none(play):
    played = play()
    await played.all_listed(acme())
    for data in (None, {}, {"keys.json": "no base64!"}, {"keys.json": "bm8gSlNPTg=="}):
        played.watch(SECRETS).put(secret_of(data))
        await turns()
        assert played.asks(KEY.key) == "acme"
        assert set(played.state("keys").kept) == {"mural/the-keys"}, "and it is said"
    played.watch(SECRETS).remove("mural/the-keys")
    await turns()
    assert played.refuses(KEY.key)


async def test_what_is_wrong_with_one_tenants_keys_in_the_secret_is_that_tenants_alone(play):
    played = play()
    other, renewed = mint_key(), mint_key()
    theirs = [{"secretRef": {"name": "globex", "key": "key"}}]
    await played.all_listed(acme(), thing("globex", keys=theirs))
    played.watch(SECRETS).put(secret(acme=KEY, globex=other))
    await turns()
    entry = {"id": renewed.key_id, "sha256": renewed.sha256}
    played.watch(SECRETS).put(secret_of(entries({"acme": 5, "globex": [entry]})))
    await turns()
    assert played.asks(KEY.key) == "acme"
    assert played.asks(renewed.key) == "globex"
    assert played.refuses(other.key)
    assert set(played.state("keys").kept) == {"mural/the-keys: acme"}
    played.watch(SECRETS).put(secret(globex=renewed))
    await turns()
    assert played.asks(KEY.key) == "acme", "the operator has no word of it either"
    played.watch(SECRETS).put(secret_of(entries({"acme": []})))
    await turns()
    assert played.refuses(KEY.key), "revoked"
    assert not played.state("keys").kept


SPOILT = [
    pytest.param({"weight": -1}, id="a value that routers refuse"),
    pytest.param({"weight": "much"}, id="a value of another kind"),
    pytest.param({"tenant": 7}, id="not even who it is"),
    pytest.param({"keys": [{"id": "somekeyid", "sha256": "no"}]}, id="a key that is none"),
    pytest.param(5, id="no spec at all"),
]


def spoil(each: dict[str, Any], how: Any) -> dict[str, Any]:
    return each | {"spec": each["spec"] | how if isinstance(how, dict) else how}


@pytest.mark.parametrize("how", SPOILT)
async def test_a_tenant_whose_edit_cannot_be_read_stays_as_it_was_until_it_is_gone(
    play, how, caplog
):
    played = play()
    inline = {"id": INLINE.key_id, "sha256": INLINE.sha256}
    whole = acme("mural", keys=[{"secretRef": {"name": "acme", "key": "key"}}, inline])
    await played.all_listed(whole)
    played.watch(f"{API}/namespaces/mural/adapteraliases").put(alias("v3"))
    played.watch(f"{API}/namespaces/mural/adapters").put(adapter(2))
    # The operator cannot read it either; whether its Secret or the edit comes first is chance.
    played.watch(SECRETS).put(secret(globex=mint_key()))
    await turns()
    for _ in range(3):
        played.watch(TENANTS).put(spoil(whole, how))
        await turns()
    assert played.asks(KEY.key) == played.asks(INLINE.key) == "acme"
    assert played.objects.declared.targets(STABLE)[0].version == "v3"
    assert played.objects.declared.replicas("acme/default:v1") == 2
    state = played.state("tenants")
    assert (state.in_force, set(state.kept), dict(state.refused)) == (1, {"mural/acme"}, {})
    said = [each for each in caplog.messages if "last readable state" in each]
    assert len(said) == 1, "it is said once"
    assert "mural/acme" in said[0]
    played.watch(TENANTS).lose()
    played.watch(TENANTS).list(spoil(whole, how))
    await turns()
    assert played.asks(KEY.key) == "acme", "it lives through another list"
    played.watch(TENANTS).put(whole)
    await turns()
    assert not played.state("tenants").kept
    played.watch(TENANTS).put(spoil(whole, how))
    played.watch(TENANTS).remove("mural/acme")
    await turns()
    assert played.refuses(KEY.key)
    assert played.refuses(INLINE.key)
    assert not played.state("tenants").kept


@pytest.mark.parametrize("change", [{"uid": "another"}, {"deletionTimestamp": NOW.isoformat()}])
async def test_another_object_of_that_name_or_one_on_its_way_out_brings_nothing_back(play, change):
    played = play()
    await played.all_listed(acme())
    assert played.asks(KEY.key) == "acme"
    bad = spoil(acme(), {"weight": -1})
    played.watch(TENANTS).put(bad | {"metadata": bad["metadata"] | change})
    await turns()
    assert played.refuses(KEY.key)
    state = played.state("tenants")
    assert (state.in_force, dict(state.kept), set(state.refused)) == (0, {}, {"mural/acme"})


async def test_after_a_restart_a_spoilt_tenant_is_unknown_and_the_others_are_not_touched(
    play, caplog
):
    played = play()
    inline = [{"id": INLINE.key_id, "sha256": INLINE.sha256}]
    bad = spoil(acme(), {"weight": -1})
    await played.all_listed(bad, thing("globex", keys=inline))
    assert played.refuses(KEY.key)
    assert played.asks(INLINE.key) == "globex"
    assert set(played.state("tenants").refused) == {"mural/acme"}
    assert "mural/acme cannot be read, and nothing is known of it" in caplog.text
    later = {"creationTimestamp": datetime(2028, 1, 1, tzinfo=UTC).isoformat()}
    young = thing("young", tenant="acme", keys=inline)
    played.watch(TENANTS).remove("mural/globex")
    played.watch(TENANTS).put(young | {"metadata": young["metadata"] | later})
    await turns()
    assert played.refuses(INLINE.key), "no younger object takes its name"
    assert "cannot be read, and is older" in played.state("tenants").refused["mural/young"]
    played.watch(TENANTS).put(acme())
    await turns()
    assert played.asks(KEY.key) == "acme"


async def test_spoilt_aliases_and_adapters_stay_as_they_were_until_they_are_gone(play):
    played = play(watched=("a", "b"))
    await played.all_listed(acme("a", "b"))
    aliases = played.watch(f"{API}/namespaces/a/adapteraliases")
    adapters = played.watch(f"{API}/namespaces/b/adapters")
    aliases.put(alias("v3", "a"))
    adapters.put(adapter(2, "b"))
    aliases.put(alias("No Version", "a"))
    adapters.put(adapter(2, "b") | {"spec": {"pool": "main"}})
    declared = played.objects.declared
    for _ in range(2):
        assert declared.targets(STABLE)[0].version == "v3"
        assert declared.replicas("acme/default:v1") == 2
        assert set(played.state("aliases").kept) == {"a/stable"}
        assert set(played.state("adapters").kept) == {"b/v1"}
        aliases.changed(None)
        adapters.changed(None)
    aliases.remove("a/stable")
    adapters.remove("b/v1")
    assert declared.targets(STABLE) is None
    assert declared.replicas("acme/default:v1") is None


async def test_while_the_api_server_is_away_what_was_known_stays_in_force(play):
    played = play()
    await played.all_listed(acme())
    played.watch(f"{API}/namespaces/mural/adapters").put(adapter(2))
    played.watch(f"{API}/namespaces/mural/adapteraliases").put(alias("v3"))
    assert not any(state.stale for state in played.objects.states())
    for watch in PlayedWatch.all.values():
        watch.lose()
    await turns()
    assert played.asks(KEY.key) == "acme"
    assert played.objects.not_ready() is None
    assert played.objects.declared.replicas("acme/default:v1") == 2
    assert played.objects.declared.targets(STABLE)[0].version == "v3"
    for state in played.objects.states():
        assert (state.stale, state.trouble) == (True, "nobody answers")


async def test_a_moved_alias_holds_from_its_event_on(play):
    played = play()
    await played.all_listed(acme())
    aliases = played.watch(f"{API}/namespaces/mural/adapteraliases")
    for version in ("v4", "v3"):
        aliases.put(alias(version))
        assert played.objects.declared.targets(STABLE)[0].version == version
    aliases.remove("mural/stable")
    assert played.objects.declared.targets(STABLE) is None


async def test_of_several_namespaces_each_hears_of_its_own(play):
    played = play(watched=("a", "b"))
    await played.all_listed(acme("a", "b"))
    declared = played.objects.declared
    for at, replicas in (("a", 2), ("b", 3)):
        played.watch(f"{API}/namespaces/{at}/adapters").put(adapter(replicas, at, name=f"v{at}"))
    assert [declared.replicas(f"acme/default:v{at}") for at in "ab"] == [2, 3]
    played.watch(f"{API}/namespaces/a/adapters").lose()
    assert [declared.replicas(f"acme/default:v{at}") for at in "ab"] == [2, 3]
    played.watch(f"{API}/namespaces/b/adapters").remove("b/vb")
    assert [declared.replicas(f"acme/default:v{at}") for at in "ab"] == [2, None]


async def test_what_does_not_count_is_listed_with_the_reason(play):
    played = play()
    await played.all_listed(acme("mural"))
    adapters = played.watch(f"{API}/namespaces/mural/adapters")
    adapters.put(adapter(2))
    adapters.put(thing("odd", pool="main", tenant="acme", version="No Version"))
    adapters.put(thing("theirs", pool="main", tenant="globex", version="v1"))
    played.watch(TENANTS).put(thing("bad", weight=-1))
    await turns()
    state = played.state("adapters")
    assert state.in_force == 1
    assert set(state.refused) == {"mural/odd", "mural/theirs"}
    assert set(played.state("tenants").refused) == {"mural/bad"}
    assert (played.state("tenants").in_force, played.state("keys").in_force) == (1, 1)


async def test_the_end_of_one_watch_ends_all(play, monkeypatch):
    async def dies(self: PlayedWatch, changed: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(PlayedWatch, "run", dies)
    played = play()
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(asyncio.shield(played.task), 20)
