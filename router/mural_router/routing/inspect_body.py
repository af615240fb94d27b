"""What routing needs to know of a request's body, and the body as a replica is sent it.

The body is not validated here, the replica does that: what is odd but has a model is passed on.
Two things are strict. The model that was authorised is the one that the replica will read,
whatever a body does with repeated or escaped keys. And what limits are counted by has the type
that it must have: a replica may take the text "50" for the number, and would compute what nobody
counted.
"""

from __future__ import annotations

import re
import zlib
from typing import Final, TypeVar

import msgspec

from mural_resolvers.errors import InvalidInput

__all__ = ["Inspected", "inspect_body", "model_value"]

MAX_KEYS: Final = 1024
MAX_COUNT: Final = 1 << 31
"""A longer answer than this is no answer; as ``n`` it is what no replica takes."""
MAX_COUNTED_BYTES: Final = 1 << 20
"""Prompts in a longer list are counted by their ends, which may be too many, never too few."""
PREFIX_BYTES: Final = 256
"""Of the prompt's JSON: about four blocks of 16 tokens, so that a common system prompt meets."""

_KEY = b'"model"'
_OPTIONS = b'"stream_options"'
_ASK_USAGE = b',"stream_options":{"include_usage":true}'
_SALT = b'"cache_salt"'
_MEMBER = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")')
# A letter of "model" that is written as an escape: then a key may be "model" without looking so.
_QUOTE = ord('"')
_ESCAPE = b"\\u00"
_ESCAPED_LETTER = re.compile(rb"\\u00(?:6[dDfF45cC])")
_LIST_OF_PROMPTS = re.compile(rb'[ \t\r\n]*\[[ \t\r\n]*["\[]')

T = TypeVar("T")


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


_body = msgspec.json.Decoder(_Body)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_text = msgspec.json.Decoder(str)


class Inspected(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields that routing reads, and the body as it is sent on."""

    model: str
    stream: bool
    include_usage: bool
    """Whether the client asked for the usage at the end of a stream."""
    sequences: int
    """``n`` times the prompts."""
    max_tokens: int | None
    """Of one sequence."""
    user: str | None
    cache_salt: str | None
    """By which the client keeps its prefix blocks apart from others'."""
    prefix: int | None
    """Hash of the first bytes of the prompt; None: there is none."""
    prompt_bytes: int
    body: bytes
    """As it came, or encoded anew where it could be read in two ways."""
    _at: tuple[int, int] | None
    """Where ``model``'s value stands in ``body``; None: in its first member."""

    @property
    def hides_usage(self) -> bool:
        """Whether `for_replica` asks for a usage that the client did not ask for."""
        return self.stream and not self.include_usage

    def for_replica(self, model: str, salt: str | None = None) -> bytes:
        """The body with another model in it, and with the usage asked for where it streams.

        ``salt`` (letters and digits) takes the place of the client's own.
        """
        asks = self.hides_usage
        if model == self.model and not asks and salt is None:
            return self.body
        if (
            self._at is None
            or (asks and _OPTIONS in self.body)
            or (salt is not None and _SALT in self.body)
        ):
            return self._encoded(msgspec.json.encode(model), asks, salt)
        start, end = self._at
        value = model_value(model, asks_usage=asks, salt=salt)
        return b"".join((self.body[:start], value, self.body[end:]))

    def _encoded(self, model: bytes, asks: bool, salt: str | None) -> bytes:
        members = _decoded_members(self.body)
        members["model"] = msgspec.Raw(model)
        if asks:
            options = _given(members, "stream_options", dict[str, msgspec.Raw], "an object") or {}
            options["include_usage"] = msgspec.Raw(b"true")
            members["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
        if salt is not None:
            members["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        return msgspec.json.encode(members)


def model_value(model: str, *, asks_usage: bool, salt: str | None) -> bytes:
    """What stands in a body in place of its model's value, members that are put in after it."""
    value = msgspec.json.encode(model)
    if asks_usage:
        value += _ASK_USAGE
    if salt is not None:
        value += b',"cache_salt":"%b"' % salt.encode()
    return value


def inspect_body(data: bytes) -> Inspected:
    """Read a body; raise ``InvalidInput`` when it is no JSON object or names no model."""
    try:
        body = _body.decode(data)
    except msgspec.ValidationError:
        body = _forgiving(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInput("The body is not valid JSON.") from None
    data, place = _unambiguous(data)
    completed = memoryview(body.prompt)
    prompt = memoryview(body.messages) or completed
    inspected = Inspected(
        model=body.model,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        sequences=_count(body.n, 1) * _prompts(completed),
        max_tokens=_max_tokens(body),
        user=body.user or None,
        cache_salt=body.cache_salt,
        prefix=_prefix(prompt) if prompt else None,
        prompt_bytes=len(prompt),
        body=data,
        _at=place,
    )
    if (inspected.hides_usage and _OPTIONS in data) or _SALT in data:
        # Its members may be written anew. Where that cannot be, the request is refused now, and
        # not when it has been given a place.
        inspected.for_replica(inspected.model, "0")
    return inspected


def _unambiguous(data: bytes) -> tuple[bytes, tuple[int, int] | None]:
    """The body with one member ``model``, and where its value stands if it is still ours."""
    if data.count(_KEY) == 1 and (_ESCAPE not in data or _ESCAPED_LETTER.search(data) is None):
        # One such string in all of it, and there is a model: so this is its key.
        found = _MEMBER.search(data)
        if found is not None:
            return data, found.span(1)
    # Nested, repeated or escaped: the last one counted when it was read, and is the one that is
    # sent on.
    members = _decoded_members(data)
    if len(members) > MAX_KEYS:
        raise InvalidInput(f"The body has more than {MAX_KEYS} members.")
    return msgspec.json.encode(members), None


def _decoded_members(data: bytes) -> dict[str, msgspec.Raw]:
    """The values as they came. A struct's decoder passes over text that this one refuses."""
    try:
        return _members.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInput("The body is not a JSON object.") from None


def _forgiving(data: bytes) -> _Body:
    """Read a body some of whose fields have a type that they cannot have, or say which it is."""
    members = _decoded_members(data)
    if "model" not in members:
        raise InvalidInput("The body names no model.")
    try:
        model = _text.decode(members["model"])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidInput("The body's model is not a text.") from None
    return _Body(
        model=model,
        stream=_given(members, "stream", bool, "true or false"),
        stream_options=_given(members, "stream_options", _StreamOptions, "an object of options"),
        n=_given(members, "n", int, "a whole number"),
        max_tokens=_given(members, "max_tokens", int, "a whole number"),
        max_completion_tokens=_given(members, "max_completion_tokens", int, "a whole number"),
        user=_hint(members, "user"),
        cache_salt=_hint(members, "cache_salt"),
        prompt=members.get("prompt", msgspec.Raw()),
        messages=members.get("messages", msgspec.Raw()),
    )


def _given(members: dict[str, msgspec.Raw], name: str, kind: type[T], wanted: str) -> T | None:
    """A member's value; None where it is absent or null. Raises ``InvalidInput`` for another."""
    try:
        return msgspec.json.decode(members[name], type=kind | None)
    except KeyError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInput(f"The body's {name} is not {wanted}.") from None


def _hint(members: dict[str, msgspec.Raw], name: str) -> str | None:
    """A text that nothing is decided by: any other type of it is left to the replica."""
    try:
        return _text.decode(members[name])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _prompts(prompt: memoryview) -> int:
    """How many prompts a completion has: a text or a list of token ids is one."""
    if not prompt or prompt[0] == _QUOTE or _LIST_OF_PROMPTS.match(prompt) is None:
        return 1
    if len(prompt) > MAX_COUNTED_BYTES:
        # Millions of empty prompts would keep everybody else waiting while they are told apart.
        data = bytes(prompt)
        return 1 + data.count(b'",') + data.count(b"],")
    try:
        return max(1, len(_items.decode(prompt)))
    except (msgspec.DecodeError, RecursionError):
        return 1


def _max_tokens(body: _Body) -> int | None:
    asked = body.max_completion_tokens
    asked = body.max_tokens if asked is None else asked
    # A replica may cut it to what it can do: what no answer can have counts as the most.
    return None if asked is None else min(max(asked, 0), MAX_COUNT)


def _count(value: int | None, least: int) -> int:
    """What is out of range is refused by the replica, with its reason."""
    return least if value is None or not least <= value <= MAX_COUNT else value


def _prefix(prompt: memoryview) -> int:
    # The same in every router. Prompts of one sum by chance share a group, which harms nobody.
    return zlib.crc32(prompt[:PREFIX_BYTES])
