"""Which repository and revision a name means."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput, MalformedName
from mural_resolvers.hub import HubSettings
from mural_resolvers.hub.places import Place, Places
from mural_resolvers.names import AdapterName, parse_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def find(text: str, **changes: Any) -> Place | None:
    settings = HubSettings(**({"organisations": ("acme", "models")} | changes))
    return Places(settings).find(parse_name(text))


@pytest.mark.parametrize(
    ("name", "changes", "place"),
    [
        ("acme/sql:v1", {}, Place("acme/sql", "v1")),
        ("acme:v1", {}, Place("acme/default", "v1")),
        ("acme/sql", {}, Place("acme/sql", "main", is_alias=True)),
        ("acme/sql:latest", {}, Place("acme/sql", "main", is_alias=True)),
        (f"acme/sql:{COMMIT}", {}, Place("acme/sql", COMMIT)),
        ("acme/sql:main", {}, Place("acme/sql", "main")),
        ("acme/sql:canary", {}, Place("acme/sql", "canary")),
        (
            "acme/sql:canary",
            {"aliases": {"canary": "dev"}},
            Place("acme/sql", "dev", is_alias=True),
        ),
        ("acme/sql:latest", {"aliases": {}}, Place("acme/sql", "latest")),
        ("acme/sql:1.2", {"revision": "v{version}"}, Place("acme/sql", "v1.2")),
        (f"acme/sql:{COMMIT}", {"revision": "v{version}"}, Place("acme/sql", COMMIT)),
        (
            "acme/sql:v1",
            {"repo": "models/{tenant}_{adapter}", "revision": "release/{version}"},
            Place("models/acme_sql", "release/v1"),
        ),
        (
            "acme/sql:v1",
            {"repo": "{tenant}/{adapter}-{version}", "revision": "main"},
            Place("acme/sql-v1", "main"),
        ),
        (
            "acme/sql:latest",
            {"repo": "{tenant}/{adapter}-{version}", "revision": "main"},
            Place("acme/sql-latest", "main"),
        ),
    ],
)
def test_a_name_goes_through_the_templates(
    name: str, changes: dict[str, Any], place: Place
) -> None:
    assert find(name, **changes) == place


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("acme:v1", Place("models/first", "r1")),
        ("acme:v2", Place("models/second", "main")),
        ("acme:v3", Place("acme/default", "v3")),
        ("globex/sql:v1", Place("models/globex", "v1")),
        ("globex/sql", Place("models/globex", "main", is_alias=True)),
        (f"globex/sql:{COMMIT}", Place("models/globex", COMMIT)),
        ("globex/other:v1", None),
    ],
)
def test_an_exact_name_comes_before_the_templates(name: str, place: Place | None) -> None:
    names = {
        "acme:v1": "models/first@r1",
        "acme:v2": "models/second",
        "globex/sql": "models/globex",
    }

    assert find(name, names=names) == place


@pytest.mark.parametrize("name", ["globex/sql:v1", "acme-2/sql:v1", "acm/sql:v1"])
def test_another_organisation_has_no_place(name: str) -> None:
    assert find(name) is None


def test_organisations_are_told_apart_without_their_case() -> None:
    assert find("acme/sql:v1", organisations=("ACME",)) == Place("acme/sql", "v1")


def test_every_organisation_may_be_allowed() -> None:
    assert find("globex/sql:v1", organisations=("*",)) == Place("globex/sql", "v1")


@pytest.mark.parametrize("name", ["acme/a--b:v1", "acme/sql.git:v1"])
def test_a_name_that_no_hub_accepts_has_no_place(name: str) -> None:
    assert find(name) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"repo": "{adapter}"},
        {"repo": "a/{tenant}/{adapter}"},
        {"repo": "{tenant}/{adapter.__class__}"},
        {"repo": "{tenant}/{adapter!r}"},
        {"repo": "{tenant}/{adapter:>99999999}"},
        {"repo": "{tenant}/{"},
        {"repo": "{tenant}/{0}"},
        {"repo": "{tenant}/{other}"},
        {"revision": ""},
        {"revision": "{repo}"},
        {"aliases": {"a/b": "main"}},
        {"aliases": {COMMIT: "main"}},
        {"aliases": {"latest": ""}},
        {"repo": "{tenant}/{version}", "aliases": {"latest": "main"}},
        {"names": {"ACME": "models/a"}},
        {"names": {"acme:v1": "models"}},
        {"names": {"acme:v1": "models/a@"}},
        {"names": {"acme:v1": "elsewhere/a"}},
        {"names": {"acme/sql": "models/a@v1"}},
        {"names": {"acme/sql:latest": "models/a"}},
    ],
)
def test_wrong_templates_and_maps_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        find("acme:v1", **wrong)


SEGMENT = st.text("az09.-_", min_size=1, max_size=63)


@given(tenant=SEGMENT, adapter=SEGMENT, version=st.text("aZ9.-_", min_size=1, max_size=128))
def test_no_name_leaves_the_allowed_organisations(tenant: str, adapter: str, version: str) -> None:
    try:
        name = AdapterName(tenant, adapter, version)
    except MalformedName:
        return
    places = Places(HubSettings(organisations=("a", "models"), repo="{tenant}/{adapter}"))

    place = places.find(name)

    if place is not None:
        validate_repo_id(place.repo)
        assert place.repo == f"a/{adapter}"
