"""Who may use what."""

from __future__ import annotations

import pytest

from mural_resolvers.errors import Forbidden, error_body
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import (
    ADMIN,
    ANYONE,
    Principal,
    authorize,
    authorize_base,
    is_grant,
    may_use,
    may_use_source,
)


@pytest.mark.parametrize(
    ("grants", "name", "allowed"),
    [
        ((), "acme:v1", True),
        ((), "acme/sql:latest", True),
        ((), "globex:v1", False),
        ((), "acme.evil:v1", False),
        (("globex",), "globex/sql:v9", True),
        (("globex",), "globex2:v1", False),
        (("globex/sql",), "globex/sql:v1", True),
        (("globex/sql",), "globex/sql:latest", True),
        (("globex/sql:*",), "globex/sql:v1", True),
        (("globex/sql:*",), "globex:v1", False),
        (("globex/sql",), "globex:v1", False),
        (("globex/sql:v1",), "globex/sql:v1", True),
        (("globex/sql:v1",), "globex/sql:v2", False),
        (("globex/sql:v1",), "globex/sql:latest", False),
        (("globex:v1",), "globex:v1", True),
        (("globex:v1",), "globex/sql:v1", False),
        (("globex/*:v1",), "globex/sql:v1", True),
        (("glob*",), "globex:v1", True),
        (("g*:v1",), "globex/sql:v1", False),
        (("*/sql",), "globex/sql:v3", True),
        (("*/sql",), "globex/sql2:v3", False),
        (("@*",), "globex:v1", False),
    ],
)
def test_a_tenant_may_use_its_own_and_what_it_was_granted(
    grants: tuple[str, ...], name: str, allowed: bool
) -> None:
    principal = Principal(tenant="acme", grants=grants)

    assert may_use(principal, parse_name(name)) is allowed
    if not allowed:
        with pytest.raises(Forbidden):
            authorize(principal, parse_name(name))


@pytest.mark.parametrize(
    ("principal", "shared", "allowed"),
    [
        (Principal(tenant="acme"), False, False),
        (Principal(tenant="acme"), True, True),
        (Principal(tenant="acme", grants=("@sql*",)), False, True),
        (Principal(tenant="acme", grants=("@team/*",)), False, False),
        (Principal(tenant="sql-bot"), False, False),
        (Principal(tenant="acme", grants=("sql-bot", "*")), False, False),
        (Principal(tenant=None, rights=frozenset({ADMIN})), False, True),
        (ANYONE, False, True),
    ],
)
def test_a_registered_name_belongs_to_no_tenant(
    principal: Principal, shared: bool, allowed: bool
) -> None:
    assert may_use(principal, "sql-bot", shared=shared) is allowed


def test_an_admin_may_use_everything_and_anyone_too_without_being_admin() -> None:
    authorize(Principal(tenant=None, rights=frozenset({ADMIN})), parse_name("globex:v1"))
    authorize(ANYONE, parse_name("globex:v1"))
    assert not ANYONE.is_admin


def test_a_principal_without_a_tenant_owns_nothing() -> None:
    assert not may_use(Principal(tenant=None), parse_name("none:v1"))


def test_a_tenant_without_the_base_is_refused_as_for_any_other_name() -> None:
    authorize_base(Principal(tenant="acme"))
    authorize_base(Principal(tenant=None, rights=frozenset({ADMIN}), base=False))

    with pytest.raises(Forbidden) as caught:
        authorize_base(Principal(tenant="acme", base=False))
    assert error_body(caught.value) == error_body(Forbidden())


@pytest.mark.parametrize(
    ("principal", "allowed"),
    [
        (Principal(tenant="acme"), True),
        (Principal(tenant="acme", sources=frozenset({"s3", "hub"})), True),
        (Principal(tenant="acme", sources=frozenset({"uploads"})), False),
        (Principal(tenant="acme", sources=frozenset()), False),
        (Principal(tenant=None, rights=frozenset({ADMIN}), sources=frozenset()), True),
        (ANYONE, True),
    ],
)
def test_sources_may_be_limited_by_name(principal: Principal, allowed: bool) -> None:
    assert may_use_source(principal, "s3") is allowed


@pytest.mark.parametrize("text", ["", "a b", "a/b/c", "a:b:c", "@", "a\n", "é", "A"], ids=ascii)
def test_what_is_no_grant_is_told_apart(text: str) -> None:
    assert not is_grant(text)
