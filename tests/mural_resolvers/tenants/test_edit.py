"""Changes to a file: what is asked for, and every other byte as it was."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput
from mural_resolvers.tenants import KeyRecord, parse_tenants
from mural_resolvers.tenants.edit import add_key, add_tenant, key_yaml, remove_key, rewrite

SHA = "ab" * 32
NEW = KeyRecord(
    "00000000",
    "cd" * 32,
    datetime(2026, 11, 29, 12, tzinfo=UTC),
    datetime(2027, 1, 1, tzinfo=UTC),
    "it's ours: #1",
)

FORMS = {
    "block": f"""\
# top
tenants:

  - id: acme   # the first
    keys:
      # old ones
      - id: '12345678'
        sha256: {SHA}   # never mind
      # a comment behind
    weight: 2

  # about globex
  - id: globex
# end
""",
    "indentless": f"""\
tenants:
- id: acme
  keys:
  - id: '12345678'
    sha256: {SHA}
- id: globex
""",
    "flow items": f"tenants:\n  - id: acme\n    keys:\n      - {{id: '12345678', sha256: {SHA}}}\n",
    "flow": f"tenants: [{{id: acme, keys: [{{id: '12345678', sha256: {SHA}}}]}}]",
    "json": '{"tenants": [{"id": "acme", "keys": [{"id": "12345678", "sha256": "'
    + SHA
    + '"}]}]}\n',
    "no keys": "tenants:\n  - id: acme\n    weight: 2   # heavy\n# end\n",
    "empty keys": "tenants:\n  - id: acme\n    keys: []\n",
    "no keys in flow": "tenants:\n  - {id: acme}\n",
    "no line end": "tenants:\n  - id: acme",
    "windows": "tenants:\r\n  - id: acme\r\n    keys:\r\n"
    f"      - id: '12345678'\r\n        sha256: {SHA}\r\n",
    "others after": f"""\
tenants:
  - keys:
      - note: "a \\"quoted\\" one"
        id: '12345678'
        sha256: >-
          {SHA}
    id: acme
admin_keys:
  - id: adminkey
    sha256: {SHA}
""",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("tenant", ["acme", None])
def test_a_key_is_added_and_nothing_is_lost(text: str, tenant: str | None) -> None:
    changed = add_key(text, tenant, NEW)

    found = parse_tenants(changed.encode())
    assert NEW in [key for owner, key in found.all_keys() if (owner and owner.id) == tenant]
    assert len(list(found.all_keys())) == len(list(parse_tenants(text.encode()).all_keys())) + 1
    lines = iter(changed.splitlines())
    if "{" not in text and "[" not in text:
        assert all(line in lines for line in text.splitlines()), "a line is gone or has moved"


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("tenant", ["acme", None])
def test_a_key_that_was_added_is_taken_out_again(text: str, tenant: str | None) -> None:
    changed = remove_key(add_key(text, tenant, NEW), NEW.id)

    assert parse_tenants(changed.encode()) == parse_tenants(text.encode())
    if "12345678" in text and tenant == "acme":
        assert changed == text


@pytest.mark.parametrize("text", [text for text in FORMS.values() if "12345678" in text])
def test_the_last_key_of_a_tenant_may_go(text: str) -> None:
    changed = remove_key(text, "12345678")

    acme = parse_tenants(changed.encode()).find("acme")
    assert acme is not None
    assert acme.keys == ()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in changed.splitlines() if line.startswith("#")
    ]
    assert NEW in [
        key for _, key in parse_tenants(add_key(changed, "acme", NEW).encode()).all_keys()
    ]


@pytest.mark.parametrize("text", [*FORMS.values(), "", "tenants: []\n", "# nothing yet\n"])
def test_a_tenant_is_added(text: str) -> None:
    changed = add_tenant(text, "initech")

    assert parse_tenants(changed.encode()).tenants[-1].id == "initech"
    assert NEW in parse_tenants(add_key(changed, "initech", NEW).encode()).tenants[-1].keys


def test_what_is_not_in_the_file_cannot_be_changed() -> None:
    with pytest.raises(InvalidInput, match="no tenant 'globex'"):
        add_key(FORMS["flow"], "globex", NEW)
    with pytest.raises(InvalidInput, match="no key"):
        remove_key(FORMS["flow"], "87654321")


def test_a_form_that_is_not_foreseen_is_refused_rather_than_spoilt() -> None:
    shared = f"""\
tenants:
  - id: acme
    keys: &both
      - id: '12345678'
        sha256: {SHA}
admin_keys: []
"""
    # The alias has its keys elsewhere, so a change there would be one of two places.
    text = shared.replace("admin_keys: []", "") + "  - {id: globex, keys: [*k]}\n"
    with pytest.raises(InvalidInput):
        add_key(text, "globex", NEW)


notes = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40).filter(str.isprintable)


@given(notes)
def test_any_note_survives(note: str) -> None:
    key = KeyRecord("00000000", SHA, note=note)

    assert parse_tenants(f"tenants: []\nadmin_keys: [{key_yaml(key)}]".encode()).admin_keys == (
        key,
    )


def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "tenants.yaml", tmp_path / "link.yaml"
    path.write_bytes(b"tenants: []\r\n# \xc3\xa9\r\n")
    path.chmod(0o640)
    link.symlink_to(path)

    rewrite(link, lambda text: text + "# more\n")

    assert path.read_bytes() == b"tenants: []\r\n# \xc3\xa9\r\n# more\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "tenants.yaml"]


def test_a_new_file_is_its_owner_s_alone(tmp_path: Path) -> None:
    rewrite(tmp_path / "new.yaml", lambda text: f"{text}tenants: []\n")

    assert stat.S_IMODE((tmp_path / "new.yaml").stat().st_mode) == 0o600


def test_a_change_that_fails_leaves_the_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: []\n")

    def fail(text: str) -> str:
        raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        rewrite(path, fail)
    with pytest.raises(InvalidInput):
        rewrite(path, lambda text: "\ud800")
    assert path.read_text() == "tenants: []\n"
    assert os.listdir(tmp_path) == ["tenants.yaml"]


def test_a_folder_that_is_absent_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        rewrite(tmp_path / "absent" / "tenants.yaml", lambda text: text)
