"""A release from its installation to its end, on real pods. Each test goes on from the last one.

Times are printed, not asserted, but for bounds that only a fault can break.
"""

from __future__ import annotations

import base64
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.installation import RELEASE, TEAM, Mural, expected, minted, secret
from tests.cluster.kubectl import Kubectl, Object, Watched, holds, within

pytestmark = pytest.mark.cluster_node

Figure = Callable[[str, str], None]
SERVERS = f"statefulset/{RELEASE}-server"
ROUTERS, ROUTER_PODS = f"deployment/{RELEASE}-router", "app.kubernetes.io/component=router"
READY_S, HEAL_S, ROLLOUT_S = 120.0, 240.0, 600.0


def adapter(name: str, **placement: object) -> Object:
    """An Adapter object of its tenant's version, as in acme-v1."""
    tenant, _, version = name.partition("-")
    return {
        "apiVersion": "mural.dev/v1alpha1",
        "kind": "Adapter",
        "metadata": {"name": name},
        "spec": {
            "pool": "default",
            "tenant": tenant,
            "version": version,
            "placement": placement,
        },
    }


def alias(name: str, **weights: int) -> Object:
    """What acme:name stands for."""
    return {
        "apiVersion": "mural.dev/v1alpha1",
        "kind": "AdapterAlias",
        "metadata": {"name": f"acme-{name}"},
        "spec": {
            "tenant": "acme",
            "alias": name,
            "versions": [{"version": each, "weight": weight} for each, weight in weights.items()],
        },
    }


def answer(client: openai.OpenAI, model: str, prompt: str) -> str:
    """What greedy decoding says."""
    said = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=48,
        temperature=0,
    )
    return said.choices[0].message.content or ""


def exact_name(client: openai.OpenAI, model: str) -> str:
    """The version that answers."""
    return client.completions.create(model=model, prompt="Ticket:", max_tokens=1).model


def seconds_until(there: Kubectl, what: str, condition: str, limit_s: float) -> float:
    """Wait as ``kubectl wait`` does, which is told of every change."""
    began = time.monotonic()
    there(
        *("wait", what, f"--for={condition}", f"--timeout={limit_s:g}s"),
        timeout_s=limit_s + 30,
    )
    return time.monotonic() - began


def home_of(there: Kubectl, name: str) -> str:
    """The only pod that an Adapter is placed on."""
    (entry,) = there.get("adapter", name)["status"]["replicas"]
    return str(entry["pod"])


# -- it comes up ----------------------------------------------------------------------------------


def test_every_pod_turns_ready_without_root_and_without_a_writable_root(
    mural: Mural, figure: Figure
) -> None:
    figure(
        "helm install --wait, two servers, two routers, two operators", f"{mural.installed_s:.0f} s"
    )
    for component, wanted in (("server", 2), ("router", 2), ("operator", 2), ("redis", 1)):
        assert len(mural.kubectl.ready_pods(component)) == wanted, component
    script = (
        "import json, os, pathlib\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "try: pathlib.Path('/probe').touch(); root = 'writable'\n"
        "except OSError as error: root = error.strerror\n"
        "token = os.path.exists('/var/run/secrets/kubernetes.io')\n"
        "print(json.dumps([os.getuid(), root, status['CapEff'], status['Seccomp'], token]))"
    )
    for component in ("server", "router", "operator"):
        (pod, *_) = mural.kubectl.ready_pods(component)
        uid, root, capabilities, seccomp, token = json.loads(
            mural.kubectl("exec", pod, "--", "python3", "-c", script)
        )
        assert (uid, root) == (65532, "Read-only file system"), component
        assert int(capabilities, 16) == 0
        assert seccomp.strip() == "2"
        # Servers watch nothing and read no Secret.
        assert token == (component != "server")


def test_a_tenant_is_known_to_the_routers_by_the_key_of_its_secret(
    mural: Mural, figure: Figure
) -> None:
    for tenant in ("acme", "globex"):
        # As the notes of the chart say.
        printed = mural.kubectl(
            "exec", f"deploy/{RELEASE}-router", "--", "mural", "tenants", "create-key", tenant
        )
        mural.keys[tenant] = minted(printed)
    began = time.monotonic()
    for tenant, namespace in (("acme", mural.kubectl.namespace), ("globex", TEAM)):
        reference = {"secretRef": {"name": f"{tenant}-key", "key": "key"}}
        mural.kubectl.apply(
            secret(f"{tenant}-key", {"key": mural.keys[tenant]}),
            {
                "apiVersion": "mural.dev/v1alpha1",
                "kind": "Tenant",
                "metadata": {"name": tenant},
                "spec": {"namespaces": [namespace], "keys": [reference]},
            },
        )
    for tenant in ("acme", "globex"):
        client = mural.client(tenant)
        within(30, f"{tenant} is let in by every router", partial(_in_by_all, client))
    figure("Tenant applied → its key is taken by every router", f"{time.monotonic() - began:.1f} s")
    written = mural.kubectl.get("secret", f"{RELEASE}-router-keys")["data"]["keys.json"]
    known = base64.b64decode(written).decode()
    for tenant, key in mural.keys.items():
        key_id, _, hidden = key.removeprefix("mural_").partition("_")
        assert tenant in known
        assert key_id in known
        assert hidden not in known


def test_all_routers_count_a_tenants_requests_together(mural: Mural) -> None:
    mural.keys["initech"] = minted(
        mural.kubectl(
            "exec", f"deploy/{RELEASE}-router", "--", "mural", "tenants", "create-key", "initech"
        )
    )
    mural.kubectl.apply(
        secret("initech-key", {"key": mural.keys["initech"]}),
        {
            "apiVersion": "mural.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": "initech"},
            "spec": {
                "keys": [{"secretRef": {"name": "initech-key", "key": "key"}}],
                "limits": {"requestsPerMinute": 6},
            },
        },
    )
    client = mural.client("initech").with_options(default_headers={"Connection": "close"})
    within(30, "initech is let in by every router", lambda: _in_by_all(client))
    answered = []

    def ask() -> None:
        for _ in range(20):
            answered.append(exact_name(client, "smollm2"))

    with pytest.raises(openai.RateLimitError) as refused:
        ask()
    # Counted by each router alone it would be up to twice as many.
    assert len(answered) == 6
    assert int(refused.value.response.headers["retry-after"]) > 0


def _in_by_all(client: openai.OpenAI) -> bool:
    """A request a connection, so that each router is met."""
    fresh = client.with_options(default_headers={"Connection": "close"})
    try:
        return all(fresh.models.list() for _ in range(8))
    except openai.AuthenticationError:
        return False


# -- adapters -------------------------------------------------------------------------------------


def test_a_declared_adapter_turns_ready_on_the_replicas_that_it_asked_for(
    mural: Mural, figure: Figure
) -> None:
    for there, name, replicas in ((mural.kubectl, "acme-v1", 2), (mural.team, "globex-v1", 1)):
        began = time.monotonic()
        there.apply(adapter(name, replicas=replicas))
        seconds_until(there, f"adapter/{name}", "condition=Ready", READY_S)
        figure(f"Adapter applied → resident on {replicas}", f"{time.monotonic() - began:.1f} s")
    table = mural.kubectl("get", "adapters")
    (row,) = [line.split() for line in table.splitlines() if line.startswith("acme-v1")]
    assert "2/2" in row, table
    status = mural.kubectl.get("adapter", "acme-v1")["status"]
    assert {entry["pod"] for entry in status["replicas"]} == set(mural.kubectl.ready_pods("server"))
    assert {entry["level"] for entry in status["replicas"]} == {"host"}
    assert len({entry["digest"] for entry in status["replicas"]}) == 1


def test_each_tenant_is_answered_by_its_own_adapter_through_the_service(mural: Mural) -> None:
    for model in ("acme:v1", "globex:v1"):
        client = mural.client(model.partition(":")[0])
        for each in expected()[model]:
            assert answer(client, model, each["prompt"]) == each["expected"]
        assert exact_name(client, model) == model


def test_a_wrong_key_and_another_tenants_adapter_are_refused(mural: Mural) -> None:
    stranger = openai.OpenAI(base_url=f"{mural.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        exact_name(stranger, "acme:v1")
    with pytest.raises(openai.PermissionDeniedError):
        exact_name(mural.client("globex"), "acme:v1")
    with pytest.raises(openai.NotFoundError):
        exact_name(mural.client("acme"), "acme:v99")


def test_an_alias_moves_to_a_canary_and_back_at_once(mural: Mural, figure: Figure) -> None:
    client = mural.client("acme").with_options(default_headers={"Connection": "close"})
    mural.kubectl.apply(alias("stable", v1=1), adapter("acme-v2", replicas=1))
    seconds_until(mural.kubectl, "adapter/acme-v2", "condition=Ready", READY_S)

    def answers() -> set[str]:
        return {exact_name(client, "acme:stable") for _ in range(8)}

    def answered_by(versions: Collection[str]) -> bool:
        return answers() == {f"acme:{version}" for version in versions}

    within(30, "the alias is known", lambda: _or_unknown(answers) == {"acme:v1"})
    mural.kubectl.apply(alias("stable", v1=1, v2=1))
    within(30, "the canary gets its share", lambda: answers() == {"acme:v1", "acme:v2"})
    for what, weights in (("promoted", {"v2": 1}), ("rolled back", {"v1": 1})):
        mural.kubectl.apply(alias("stable", **weights))
        took = within(10, f"the canary is {what}", partial(answered_by, weights))
        figure(f"AdapterAlias {what} → every router goes by it", f"{took:.2f} s with 8 requests")
    (each, *_) = expected()["acme:v2"]
    assert answer(client, "acme:v2", each["prompt"]) == each["expected"]


def _or_unknown(answers: Callable[[], set[str]]) -> set[str]:
    try:
        return answers()
    except openai.NotFoundError:
        return set()


def test_a_deleted_adapter_leaves_the_replicas_and_its_object_goes(
    mural: Mural, figure: Figure
) -> None:
    began = time.monotonic()
    mural.kubectl("delete", "adapter", "acme-v2", "--timeout=60s")
    figure("Adapter deleted → unloaded and gone", f"{time.monotonic() - began:.1f} s")


# -- what dies ------------------------------------------------------------------------------------


def test_an_adapter_is_back_after_its_servers_death_and_its_status_told_the_truth(
    mural: Mural, figure: Figure
) -> None:
    victim = home_of(mural.team, "globex-v1")
    with (
        mural.team.watched("adapter", "globex-v1") as one,
        mural.kubectl.watched("adapter", "acme-v1") as two,
    ):
        killed = time.monotonic()
        mural.kubectl.kill(victim)
        noticed = within(HEAL_S, "the loss is told", lambda: _lost(two, killed))
        within(HEAL_S, "globex:v1 is resident again", lambda: _back(one, killed))
        within(HEAL_S, "acme:v1 is resident on both again", lambda: _back(two, killed))
    figure("server killed → status says that a replica is lost", f"{noticed:.1f} s")
    figure("server killed → an adapter of one replica resident again", _first_back(one, killed))
    figure("server killed → an adapter of two replicas back on both", _first_back(two, killed))
    client = mural.client("globex")
    (each, *_) = expected()["globex:v1"]
    assert answer(client, "globex:v1", each["prompt"]) == each["expected"]


def _lost(seen: Watched, moment: float) -> bool:
    return any(not holds(state, "Ready") for state in seen.since(moment))


def _back(seen: Watched, moment: float) -> bool:
    return _lost(seen, moment) and holds(seen.since(moment)[-1], "Ready")


def _first_back(seen: Watched, moment: float) -> str:
    """When it was resident again for the first time; it may move once more."""
    ready = [(at, holds(state, "Ready")) for at, state in seen.states if at >= moment]
    since_lost = itertools.dropwhile(lambda each: each[1], ready)
    return f"{next(at for at, is_ready in since_lost if is_ready) - moment:.1f} s"


def test_another_operator_takes_over_from_a_killed_leader(mural: Mural, figure: Figure) -> None:
    def leader() -> str:
        lease = mural.kubectl.get("lease", f"{RELEASE}-operator")
        return str(lease["spec"].get("holderIdentity", "")).rpartition("_")[0]

    first = leader()
    killed = time.monotonic()
    mural.kubectl.kill(first)
    mural.kubectl.apply(adapter("acme-v2", replicas=1))
    seconds_until(mural.kubectl, "adapter/acme-v2", "condition=Ready", READY_S)
    figure("leader killed, Adapter applied → resident", f"{time.monotonic() - killed:.1f} s")
    assert leader() != first
    within(
        READY_S, "both operators are ready", lambda: len(mural.kubectl.ready_pods("operator")) == 2
    )


# -- rollouts -------------------------------------------------------------------------------------


@dataclass
class Load:
    """Requests of two tenants, one after the other in a thread each, until it is stopped."""

    mural: Mural
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for tenant in ("acme", "globex"):
            client = self.mural.client(tenant)
            thread = threading.Thread(target=self._ask, args=(client, f"{tenant}:v1"), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive(), "a request hangs"

    def told(self, took: float) -> str:
        return (
            f"{took:.0f} s, {len(self.seconds)} requests, {len(self.failures)} failed, "
            f"median {statistics.median(self.seconds):.2f} s, longest {max(self.seconds):.1f} s"
        )

    def _ask(self, client: openai.OpenAI, model: str) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            began = time.monotonic()
            try:
                if number % 2:
                    self._stream(client, model)
                else:
                    exact_name(client, model)
            # In the middle of a stream the client lets through what its connection says.
            except (openai.OpenAIError, httpx.HTTPError) as error:
                self.failures.append(f"{model} after {len(self.seconds)}: {error!r}")
            self.seconds.append(time.monotonic() - began)

    def _stream(self, client: openai.OpenAI, model: str) -> None:
        """Long enough that a pod goes while it is answering."""
        chunks = client.completions.create(
            model=model, prompt="Ticket:", max_tokens=32, stream=True
        )
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        if reasons[-1:] not in (["length"], ["stop"]):
            self.failures.append(f"{model}: a stream ended with {reasons[-1:]}")


def test_a_servers_death_under_load_fails_at_most_what_it_was_answering(
    mural: Mural, figure: Figure
) -> None:
    victim = home_of(mural.team, "globex-v1")
    with Load(mural) as load:
        within(60, "both tenants are answered", lambda: len(load.seconds) > 8)
        began = time.monotonic()
        mural.kubectl.kill(victim)
        within(30, "the death is seen", lambda: victim not in mural.kubectl.ready_pods("server"))
        seconds_until(mural.kubectl, f"pod/{victim}", "condition=Ready", HEAL_S)
    figure("a server killed under the same load", load.told(time.monotonic() - began))
    # A request a tenant was in flight at that moment.
    assert len(load.failures) <= len(("acme", "globex")), load.failures


def test_a_rollout_of_the_servers_under_load_fails_no_request(mural: Mural, figure: Figure) -> None:
    before = _uids(mural)
    with Load(mural) as load:
        began = time.monotonic()
        mural.kubectl("rollout", "restart", SERVERS)
        mural.kubectl(
            *("rollout", "status", SERVERS, f"--timeout={ROLLOUT_S:g}s"), timeout_s=ROLLOUT_S + 30
        )
        took = time.monotonic() - began
    figure(
        "rollout of two servers under the load of two tenants",
        load.told(took),
    )
    assert not load.failures
    assert len(load.seconds) > 20
    assert not before & _uids(mural)
    _all_ready(mural)


def test_a_rollout_of_the_routers_under_load_fails_no_request(mural: Mural, figure: Figure) -> None:
    with Load(mural) as load:
        began = time.monotonic()
        mural.kubectl("rollout", "restart", ROUTERS)
        mural.kubectl(
            *("rollout", "status", ROUTERS, f"--timeout={ROLLOUT_S:g}s"), timeout_s=ROLLOUT_S + 30
        )
        # The old ones are still on their way out, and have connections.
        within(
            90,
            "the old routers are gone",
            lambda: len(mural.kubectl.get("pods", "-l", ROUTER_PODS)["items"]) == 2,
        )
        took = time.monotonic() - began
    figure("rollout of two routers under the same load", load.told(took))
    assert not load.failures
    assert len(load.seconds) > 20


def _uids(mural: Mural) -> set[Any]:
    return {pod["metadata"]["uid"] for pod in mural.kubectl.pods("server")}


def _all_ready(mural: Mural) -> None:
    for there, name in (
        (mural.kubectl, "acme-v1"),
        (mural.kubectl, "acme-v2"),
        (mural.team, "globex-v1"),
    ):
        seconds_until(there, f"adapter/{name}", "condition=Ready", READY_S)


def test_a_pod_of_a_scale_up_turns_ready_with_what_is_declared_for_all(
    mural: Mural, figure: Figure
) -> None:
    everywhere = json.dumps({"spec": {"placement": {"replicas": "All"}}})
    mural.kubectl("patch", "adapter", "acme-v1", "--type=merge", "-p", everywhere)
    began = time.monotonic()
    mural.kubectl("scale", SERVERS, "--replicas=3")
    new = f"pod/{RELEASE}-server-2"
    seconds_until(mural.kubectl, new, "create", READY_S)
    seconds_until(mural.kubectl, new, "condition=Ready", HEAL_S)
    figure("servers scaled up → the new pod Ready", f"{time.monotonic() - began:.1f} s")
    # It was loaded before: what is left is that the status says so.
    seconds_until(mural.kubectl, "adapter/acme-v1", "jsonpath={.status.ready}=3/3", 5)
    began = time.monotonic()
    with Load(mural) as load:
        mural.kubectl("scale", SERVERS, "--replicas=2")
        seconds_until(mural.kubectl, new, "delete", HEAL_S)
    figure("a server scaled away under the same load", load.told(time.monotonic() - began))
    assert not load.failures
    seconds_until(mural.kubectl, "adapter/acme-v1", "jsonpath={.status.ready}=2/2", READY_S)


def test_the_charts_own_test_passes(mural: Mural) -> None:
    mural.kubectl.helm("test", RELEASE, "--timeout", "120s")


def test_an_upgrade_with_another_value_keeps_adapters_and_keys(
    mural: Mural, figure: Figure
) -> None:
    before = {each["metadata"]["uid"] for each in mural.kubectl.get("adapters")["items"]}
    pods = _uids(mural)
    mural.values["server"]["maxNumSeqs"] = 6
    began = time.monotonic()
    mural.helm("upgrade")
    figure("helm upgrade --wait of both servers", f"{time.monotonic() - began:.0f} s")
    assert before == {each["metadata"]["uid"] for each in mural.kubectl.get("adapters")["items"]}
    assert not pods & _uids(mural)
    _all_ready(mural)
    for tenant in ("acme", "globex"):
        (each, *_) = expected()[f"{tenant}:v1"]
        assert answer(mural.client(tenant), f"{tenant}:v1", each["prompt"]) == each["expected"]


# -- its end --------------------------------------------------------------------------------------


def test_an_uninstall_leaves_what_others_applied_and_nothing_that_cannot_be_deleted(
    mural: Mural, figure: Figure
) -> None:
    began = time.monotonic()
    mural.uninstall()
    figure("helm uninstall", f"{time.monotonic() - began:.0f} s")
    kinds = (
        "statefulsets,deployments,jobs,services,configmaps,secrets,serviceaccounts,roles,"
        "rolebindings,leases,networkpolicies,poddisruptionbudgets,servingpools.mural.dev"
    )
    own = {
        "configmap/kube-root-ca.crt",
        "serviceaccount/default",
        *(
            f"secret/{name}"
            for name in ("store-credentials", "acme-key", "globex-key", "initech-key")
        ),
    }

    def only_own_is_left(there: Kubectl) -> bool:
        return set(there("get", kinds, "-o", "name").split()) <= own

    def no_pod_is_left(there: Kubectl) -> bool:
        return not there.get("pods")["items"]

    for there in (mural.kubectl, mural.team):
        within(
            120,
            f"nothing of the release is left in {there.namespace}",
            partial(only_own_is_left, there),
        )
        within(120, f"no pod is left in {there.namespace}", partial(no_pod_is_left, there))
        there("delete", "adapters.mural.dev", "--all", "--timeout=30s")
    left = mural.kubectl(
        *("get", "clusterroles,clusterrolebindings", "-o", "name"),
        *("-l", "app.kubernetes.io/part-of=mural"),
    )
    assert not left
    mural.kubectl("get", "crd", "adapters.mural.dev", "servingpools.mural.dev")
