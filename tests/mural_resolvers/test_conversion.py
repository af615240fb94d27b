"""What is wrong in settings is told with its place, what is wanted there and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from mural_resolvers.conversion import converted, in_file, read_yaml
from mural_resolvers.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Retry:
    attempts: int = 3

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("one attempt is the least")


class Tenant(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    weight: float = 1.0
    base: bool = True
    keys: list[str] | None = None
    size: int | str = 1


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[Tenant] = []
    retry: Retry = Retry()
    auth: Literal["keys", "open"] | None = None
    labels: dict[str, int] = {}


def tenant(**fields: object) -> dict[str, object]:
    return {"tenants": [{"id": "a"}, {"id": "b", **fields}]}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (tenant(weight=".nan"), "tenants[1].weight: a number is wanted, not '.nan'."),
        (tenant(weight="nan"), "tenants[1].weight: a finite number is wanted, not nan."),
        (tenant(weight="-inf"), "tenants[1].weight: a finite number is wanted, not -inf."),
        (tenant(weight=None), "tenants[1].weight: a number is wanted, and nothing stands there."),
        (tenant(weight=[1]), "tenants[1].weight: a number is wanted, not a list."),
        (tenant(base="maybe"), "tenants[1].base: true or false is wanted, not 'maybe'."),
        (tenant(keys="k"), "tenants[1].keys: a list is wanted, not 'k'."),
        (tenant(keys=[{}]), "tenants[1].keys[0]: a text is wanted, not a mapping."),
        (tenant(size=[]), "tenants[1].size: a whole number or a text is wanted, not a list."),
        (tenant(wieght=1), "tenants[1].wieght: there is no such field."),
        ({"tenants": [{}]}, "tenants[0].id: is missing."),
        ({"retry": {"attempts": "x"}}, "retry.attempts: a whole number is wanted, not 'x'."),
        ({"retry": {"atempts": 1}}, "retry.atempts: there is no such field."),
        ({"retry": {"attempts": 0}}, "retry: one attempt is the least."),
        ({"auth": "opn"}, "auth: one of keys, open is wanted, not 'opn'."),
        ({"labels": {"a": "b"}}, "labels: a whole number is wanted under each name."),
        ({None: 1}, "its names are texts, every one."),
        ([], "a mapping is wanted, not a list."),
        (None, "a mapping is wanted, and nothing stands there."),
    ],
)
def test_a_refusal_names_the_place_what_is_wanted_and_what_was_found(
    value: object, told: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        converted(value, Settings)
    assert caught.value.message == told


def test_what_may_be_a_secret_is_not_shown() -> None:
    for value in (tenant(weight="a-secret"), {"auth": "a-secret"}):
        with pytest.raises(InvalidInput, match="not a text of 8 characters") as caught:
            converted(value, Settings)
        assert "a-secret" not in caught.value.message
    with pytest.raises(InvalidInput) as caught:
        converted({f"mural_abcdefgh_{'s' * 43}": 1}, Settings)
    assert "sss" not in caught.value.message


def test_the_place_stands_below_where_the_value_does() -> None:
    with pytest.raises(InvalidInput, match=r"^acme\.stable\[0\]\.weight: a number is wanted"):
        converted([{"id": "a", "weight": "x"}], list[Tenant], "acme.stable")


def test_texts_stand_for_numbers_unless_told_otherwise() -> None:
    assert converted({"id": "a", "weight": "2"}, Tenant).weight == 2
    with pytest.raises(InvalidInput, match="weight: a number is wanted, not '2'"):
        converted({"id": "a", "weight": "2"}, Tenant, strict=True)


class Files(msgspec.Struct):
    token_file: Path | None = None


def test_a_text_stands_for_a_path() -> None:
    assert converted({"token_file": "/etc/token"}, Files).token_file == Path("/etc/token")
    assert converted({"token_file": None}, Files).token_file is None
    for value, told in ((5, "not 5"), ("", "not ''")):
        with pytest.raises(InvalidInput, match=f"^token_file: a path is wanted, {told}"):
            converted({"token_file": value}, Files)


def test_a_file_is_named_whatever_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    with pytest.raises(InvalidInput, match=rf"^{path}: cannot be read: No such file"):
        read_yaml(path, 100)
    path.write_text("a: {")
    with pytest.raises(InvalidInput, match=rf"^{path}: Line 2"):
        read_yaml(path, 100)
    with pytest.raises(InvalidInput, match=rf"^{path}: larger than 3 bytes"):
        read_yaml(path, 3)
    with pytest.raises(InvalidInput, match=f"^{path}: No"), in_file(path):
        raise InvalidInput("No.")
    with pytest.raises(InvalidInput, match=r"^No\."), in_file(None):
        raise InvalidInput("No.")
