"""``mural tenants``."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mural_resolvers.cli import main
from mural_resolvers.commands.tenants import TenantsCommand
from mural_resolvers.tenants import parse_tenants, read_tenants

NOW = datetime(2026, 11, 29, 12, 0, 0, 987, tzinfo=UTC)


class Entry:
    name = "tenants"

    def load(self) -> object:
        return TenantsCommand(clock=lambda: NOW)


def tenants(*argv: object) -> int:
    return main(["tenants", *map(str, argv)], [Entry()])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text("# ours\ntenants:\n  - id: acme   # first\n    weight: 2\n")
    return path


def shown_key(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "shown once" in line]
    return line.split()[-1]


def test_a_new_key_is_in_the_file_and_shown_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tenants("create-key", "acme", "--file", file, "--expires", "90d", "--note", "ci") == 0

    key = shown_key(capsys)
    text = file.read_text()
    assert text.startswith("# ours\ntenants:\n  - id: acme   # first\n    weight: 2\n    keys:\n")
    assert key[-43:] not in text
    principal = read_tenants(file).ring().authenticate(f"Bearer {key}", NOW)
    assert (principal.tenant, principal.weight) == ("acme", 2.0)
    (record,) = read_tenants(file).tenants[0].keys
    assert (record.note, record.created) == ("ci", NOW.replace(microsecond=0))
    assert record.expires == datetime(2027, 2, 27, 12, tzinfo=UTC)


def test_without_a_file_the_record_is_printed_to_be_put_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tenants("create-key", "acme") == 0

    key_line, record_line = capsys.readouterr().out.splitlines()
    record = record_line.partition(": ")[2]
    config = parse_tenants(f"tenants: [{{id: acme, keys: [{record}]}}]".encode())
    assert config.ring().authenticate(f"Bearer {key_line.split()[-1]}", NOW).tenant == "acme"


def test_an_admin_s_key_owns_no_namespace(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tenants("create-key", "--admin", "--file", file) == 0

    principal = read_tenants(file).ring().authenticate(f"Bearer {shown_key(capsys)}", NOW)
    assert principal.is_admin
    assert principal.tenant is None


def test_a_tenant_is_added_when_asked_for(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_text()
    for path in (file, tmp_path / "new.yaml"):
        assert tenants("create-key", "globex", "--file", path) == 1
        assert "--new-tenant" in capsys.readouterr().err
        assert tenants("create-key", "globex", "--file", path, "--new-tenant") == 0
        assert tenants("create-key", "globex", "--file", path, "--new-tenant") == 0
        found = read_tenants(path).find("globex")
        assert found is not None
        assert len(found.keys) == 2
    assert file.read_text().startswith(before)


def test_a_revoked_key_is_gone_and_the_rest_is_as_it_was(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants("create-key", "acme", "--file", file, "--note", "stays")
    before = file.read_text()
    capsys.readouterr()
    tenants("create-key", "acme", "--file", file)
    key_id = shown_key(capsys).split("_")[1]

    assert tenants("revoke-key", key_id, "--file", file) == 0

    assert file.read_text() == before
    assert tenants("revoke-key", key_id, "--file", file) == 1


def test_list_shows_keys_for_people_and_for_programs(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants("create-key", "acme", "--file", file, "--note", "ci")
    tenants("create-key", "--admin", "--file", file)
    file.write_text(
        file.read_text().replace("note: 'ci'", "note: 'ci'\n        expires: 2026-01-01")
    )
    capsys.readouterr()

    assert tenants("list", "--file", file) == 0
    head, acme, admin = capsys.readouterr().out.splitlines()
    assert head.split() == ["TENANT", "KEY", "CREATED", "EXPIRES", "NOTE"]
    assert acme.startswith("acme")
    assert "(expired)" in acme
    assert acme.endswith("ci")
    assert admin.startswith("(admin)")

    assert tenants("list", "--file", file, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["tenant"], first["expired"], first["note"]) == ("acme", True, "ci")
    assert (second["tenant"], second["expires"], second["expired"]) == (None, None, False)


def test_check_says_whether_a_server_takes_the_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("tenants:\n  - {id: acme, grants: [globex/sql, 'init*', '@x']}\n")
    assert tenants("check", file) == 0
    told = capsys.readouterr().out
    assert "1 tenants, 0 keys: a server takes this file." in told
    assert "acme has no key that is valid" in told
    assert "globex is no tenant of this file" in told
    assert "init" not in told

    file.write_text("tenants:\n  - {id: acme, color: red}\n")
    assert tenants("check", file) == 1
    assert "tenants[0]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("../x",), "not a tenant name"),
        (("Acme",), "not a tenant name"),
        ((), "either a TENANT or --admin"),
        (("acme", "--admin"), "either a TENANT or --admin"),
        (("acme", "--expires", "soon"), "no time"),
        (("acme", "--expires", "2020-01-01"), "past"),
        (("acme", "--note", "\x1b[2J"), "printable"),
    ],
)
def test_a_key_that_could_not_be_used_is_not_made(
    argv: tuple[str, ...], told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_text()

    assert tenants("create-key", *argv, "--file", file) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert file.read_text() == before
