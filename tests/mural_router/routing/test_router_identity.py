"""Who a router takes its caller for, and what it tells a replica about it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from mural_resolvers.errors import Unauthorized
from mural_resolvers.tenants import ANYONE, Principal, TenantsFile, mint_key
from mural_router.routing.identity import Authenticator, upstream_identity

NOW = datetime(2027, 1, 1, tzinfo=UTC)


def tenants_file(folder: Path) -> tuple[TenantsFile, str]:
    minted = mint_key()
    path = folder / "tenants.yaml"
    path.write_text(
        "tenants:\n- id: acme\n  weight: 2.5\n  keys:\n"
        f"  - {{id: {minted.key_id}, sha256: {minted.sha256}, expires: 2027-06-01}}\n"
    )
    return TenantsFile(path), minted.key


def test_a_key_of_the_tenants_file_gives_its_tenant_until_it_expires(tmp_path: Path) -> None:
    tenants, key = tenants_file(tmp_path)
    now = [NOW]
    auth = Authenticator("keys", tenants=tenants, clock=lambda: now[0])
    assert auth.principal((f"Bearer {key}",)).tenant == "acme"
    now[0] = datetime(2028, 1, 1, tzinfo=UTC)
    with pytest.raises(Unauthorized):
        auth.principal((f"Bearer {key}",))


@pytest.mark.parametrize(
    "sent",
    [
        (),
        ("",),
        ("Bearer ",),
        ("Basic abc",),
        ("Bearer \ud800",),
        ("Bearer " + "x" * 5_000,),
        ("Bearer admin", "Bearer admin"),
    ],
)
def test_everything_but_one_good_key_is_refused_with_one_message(
    tmp_path: Path, sent: tuple[str, ...]
) -> None:
    tenants, _ = tenants_file(tmp_path)
    auth = Authenticator("keys", admin_keys=["admin"], tenants=tenants)
    with pytest.raises(Unauthorized) as refused:
        auth.principal(sent)
    assert refused.value.message == Unauthorized().message


def test_an_admin_key_of_the_settings_is_an_admin() -> None:
    auth = Authenticator("keys", admin_keys=["one", "two"])
    assert auth.principal(("Bearer two",)).is_admin
    with pytest.raises(Unauthorized):
        auth.principal(("Bearer three",))


def test_the_open_mode_takes_anyone_whatever_is_sent() -> None:
    assert Authenticator("open").principal(("x", "y")) is ANYONE


def test_a_mural_server_is_told_the_tenant_beside_the_routers_token() -> None:
    acme = Principal(tenant="acme", weight=2.5)
    headers = upstream_identity("mural", acme, token="t", digest="d" * 64)
    assert dict(headers) == {
        "authorization": "Bearer t",
        "x-mural-tenant": "acme",
        "x-mural-weight": "2.5",
        "x-mural-digest": "d" * 64,
    }


def test_vllm_is_told_its_own_key_alone_and_nobody_gets_a_clients_key() -> None:
    acme = Principal(tenant="acme")
    assert upstream_identity("vllm", acme, token="k") == (("authorization", "Bearer k"),)
    assert upstream_identity("vllm", acme, token=None) == ()
    assert "authorization" not in dict(upstream_identity("mural", acme, token=None))


async def reload(tenants: TenantsFile, text: str) -> None:
    tenants._path.write_text(text)
    for _ in range(2):  # A content is taken when it was seen twice.
        await tenants.poll()


async def test_a_key_that_was_found_good_is_of_no_use_from_the_reload_that_revokes_it_on(
    tmp_path: Path,
) -> None:
    minted = mint_key()
    path = tmp_path / "tenants.yaml"
    record = f"{{id: {minted.key_id}, sha256: {minted.sha256}}}"
    path.write_text(f"tenants:\n- {{id: acme, keys: [{record}]}}\n")
    tenants = TenantsFile(path)
    auth, header = Authenticator("keys", tenants=tenants), (f"Bearer {minted.key}",)
    first = auth.principal(header)
    assert auth.principal(header) is first
    await reload(tenants, f"tenants:\n- {{id: acme, grants: [globex], keys: [{record}]}}\n")
    assert auth.principal(header).grants == ("globex",)
    assert auth.principal(header).grants == ("globex",)
    await reload(tenants, "tenants:\n- {id: acme}\n")
    for _ in range(2):
        with pytest.raises(Unauthorized):
            auth.principal(header)


def test_only_keys_that_are_good_are_remembered_and_a_bounded_number_of_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mural_router.routing.identity.MAX_GOOD_KEYS", 3)
    minted = mint_key()
    path = tmp_path / "tenants.yaml"
    path.write_text(
        f"tenants:\n- {{id: acme, keys: [{{id: {minted.key_id}, sha256: {minted.sha256}}}]}}\n"
    )
    auth = Authenticator("keys", tenants=TenantsFile(path))
    wrong = minted.key[:-2] + ("AA" if not minted.key.endswith("AA") else "BB")
    for _ in range(3):
        with pytest.raises(Unauthorized):
            auth.principal((f"Bearer {wrong}",))
    assert not auth._good
    for spaces in range(1, 10):
        assert auth.principal((f"Bearer{' ' * spaces}{minted.key}",)).tenant == "acme"
        assert len(auth._good) <= 3
