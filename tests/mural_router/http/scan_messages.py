"""Plain requests and answers, and plausible ones that may be plain or not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from mural_router.http.head import END

BODY = b'{"model": "acme:v1", "prompt": "Hi"}'


def request(
    body: bytes = BODY,
    fields: bytes = b"",
    *,
    line: bytes = b"POST /v1/completions HTTP/1.1",
    host: bytes = b"host: a\r\n",
) -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    return b"%b\r\n%b%b%b\r\n%b" % (line, host, length, fields, body)


def answer(body: bytes = b"{}", fields: bytes = b"", *, line: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"%b\r\ncontent-length: %d\r\n%b\r\n%b" % (line, len(body), fields, body)


SPACES = ("", "", "", " ", " ", "\n", "\t", "\r\n  ")
MODELS = ("acme:v1", "acme/chat:v1", "m", "", "A.b_c-d:0", "x" * 512)
ODD_MODELS = ("x" * 513, "a b", "ä", "a\\u003ab", 'a\\"b', "\\u006dodel", "a\\\\b", "\x7f")
TEXTS = (
    *("Hi", "", " ", "ä", "界", "😀", "\x7f", "\\n", '\\"', "\\\\", "\\/", "\\u00e9"),
    "\\ud83d\\ude00",
    *('\\"model\\":', "model", '\\"stream_options\\"', "\\u0041", "\\\\u006d", "\\u001f", "{}[],:"),
)
ODD_TEXTS = ("\\u006d", "\\ud83d", "\\ud83dx", "\\ude00", "\\x", "\\u12", "\\", "\x00", "\n", '"')
NUMBERS = (
    *("0", "-0", "1", "12", "0.5", "-1.25", "1e5", "1E+5", "2e-3", "1.0", "9" * 30, "1e999"),
    *("123456789", "1234567890", "16"),
)
ODD_NUMBERS = ("01", "1.", ".5", "-", "+1", "1e", "0x1", "NaN", "Infinity", "1_0", "--1")
NAMES = ("temperature", "top_p", "stop", "seed", "x", "", "logit_bias", "Model", "best_of", "ä")
ODD_NAMES = (
    *("model", "m\\u006fdel", "stream_options", "cache_salt", "n", "stream", "prompt"),
    *("messages", "max_tokens", "user", "a\\nb", "\\u0073tream"),
)


class Writer:
    """Writes messages; ``odd`` says how often a part of one is out of the ordinary."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.odd = random.choice((0.0, 0.0, 0.0, 0.02, 0.2))

    def is_odd(self) -> bool:
        return self.odd > 0 and self.random.random() < self.odd

    def either(self, usual: tuple[str, ...], odd: tuple[str, ...]) -> str:
        return self.random.choice(odd if self.is_odd() else usual)

    def space(self) -> str:
        return self.random.choice(SPACES)

    def text(self) -> str:
        parts = [self.either(TEXTS, ODD_TEXTS) for _ in range(self.random.randrange(4))]
        return f'"{"".join(parts)}"'

    def value(self, depth: int = 0) -> str:
        kind = self.random.randrange(8 if depth < 3 else 6)
        if kind < 2:
            return self.text()
        if kind < 4:
            return self.either(NUMBERS, ODD_NUMBERS)
        if kind == 4 and self.is_odd():
            deep = self.random.choice((60, 63, 64, 65, 66, 200, 5000))
            return "[" * deep + "]" * deep
        if kind < 6:
            return self.either(("true", "false", "null"), ("True", "nul", "", "nulll", "-true"))
        items = range(self.random.randrange(4))
        if kind == 6:
            return self.joined("[", [self.value(depth + 1) for _ in items], "]")
        members = [(self.either(NAMES, ODD_NAMES), self.value(depth + 1)) for _ in items]
        return self.object(members)

    def joined(self, start: str, parts: list[str], end: str) -> str:
        between = self.either((",",), ("", ",,", ";"))
        inside = between.join(f"{self.space()}{part}{self.space()}" for part in parts)
        return f"{start}{inside or self.space()}{end}"

    def object(self, members: list[tuple[str, str]]) -> str:
        parts = [
            f'"{name}"{self.space()}{self.either((":",), ("", "::"))}{self.space()}{value}'
            for name, value in members
        ]
        return self.joined("{", parts, "}")

    def prompt(self) -> str:
        """A text; or a list: of token ids, or of prompts, mostly one."""
        random = self.random
        kind = random.randrange(4)
        if kind < 2:
            return self.text()
        if kind == 2:
            ids = range(random.randrange(4))
            return self.joined("[", [self.either(NUMBERS, ODD_NUMBERS) for _ in ids], "]")
        prompts = range(2 if self.is_odd() else 1)
        return self.joined("[", [self.prompt() for _ in prompts], "]")

    def body(self) -> str:
        random = self.random
        members = [("model", f'"{self.either(MODELS, ODD_MODELS)}"')]
        usual: dict[str, Callable[[], str]] = {
            "prompt": self.prompt,
            "messages": self.value,
            "stream": lambda: random.choice(("true", "false")),
            "max_tokens": lambda: random.choice(("0", "1", "16", "999999999")),
            "max_completion_tokens": lambda: random.choice(("0", "7", "2147483")),
            "n": lambda: "1",
            "user": self.text,
            "stream_options": lambda: self.object(
                [("include_usage", self.either(("true",), ("false", "null", "1")))]
                * (random.choice((0, 2)) if self.is_odd() else 1)
            ),
        }
        for name, value in usual.items():
            if random.random() < 0.4:
                members.append((name, self.value() if self.is_odd() else value()))
        for _ in range(random.randrange(3)):
            members.append((self.either(NAMES, ODD_NAMES), self.value()))
        if self.is_odd():
            members.append(random.choice(members))
        if self.is_odd():
            members.remove(random.choice(members))
        random.shuffle(members)
        return self.space() + self.object(members) + self.space()

    def field(self, name: str, value: str) -> str:
        name = self.random.choice((name, name, name.title(), name.upper()))
        colon = self.either((": ", ":", ":\t  "), (" :", "", ":\r\n ", ":\0"))
        return name + colon + value + self.random.choice(("", "", " ", " \t"))

    def head(self, line: str, fields: list[str]) -> str:
        if self.is_odd():
            fields.append(self.random.choice(fields))
        self.random.shuffle(fields)
        ends = self.either(("\r\n",), ("\n", "\r", "\r\r\n", "\r\n\r\n"))
        last = self.either(("\r\n\r\n",), (ends,))
        return line + "".join(ends + field for field in fields) + last

    def length(self, body: bytes) -> str:
        size = len(body)
        return self.either(
            (str(size), str(size), f"{size:04}", f"{size:015}"),
            (f"{size:016}", str(size + 1), str(size - 1), f"+{size}", f"{size},{size}", "", "0"),
        )

    def request(self) -> bytes:
        body = self.body().encode("utf-8")
        line = self.either(
            ("POST /v1/completions HTTP/1.1", "POST /v1/chat/completions HTTP/1.1"),
            (
                *("GET /v1/completions HTTP/1.1", "POST /v1/completions HTTP/1.0"),
                *("POST /v1/completions?a=b HTTP/1.1", "POST http://a/v1/completions HTTP/1.1"),
                *("POST /v1/embeddings HTTP/1.1", "POST  /v1/completions HTTP/1.1"),
                *("POST /v1/completions/ HTTP/1.1", "POST /v1/Completions HTTP/1.1"),
            ),
        )
        host = self.either(
            ("a", "A.b-c_d:80", "10.0.0.1:8000", "localhost"),
            ("[::1]:80", "", "a:", "a:123456", "a b", "a/b", "a@b", "é"),
        )
        fields = [self.field("host", host), self.field("content-length", self.length(body))]
        usual = {
            "authorization": ("Bearer mural_0_abc", "", "Basic eA==", "é\tx", "b" * 512),
            "content-type": ("application/json", "Application/JSON; Charset=UTF-8"),
            "connection": ("keep-alive", "Keep-Alive"),
            "accept": ("*/*",),
            "accept-encoding": ("gzip, deflate",),
            "user-agent": ("curl/8.0", ""),
            "cookie": ("a=b; c=é",),
            "x-mural-tenant": ("other",),
            "x-request-id": ("r", "~!" * 64),
            "x-session-id": ("s", "", "é"),
            "traceparent": ("00-a-b-01", "", "é\tx"),
            "tracestate": ("a=b", ""),
            "te": ("trailers",),
        }
        for name, values in usual.items():
            if self.random.random() < 0.4:
                fields.append(self.field(name, self.random.choice(values)))
        odd = {
            "authorization": "b" * 513,
            "content-type": "application/json; charset=latin-1",
            "connection": "close",
            "content-encoding": "identity",
            "expect": "100-continue",
            "transfer-encoding": "chunked",
            "traceparent": "00-a-b-02",
            "tracestate": "a=c",
            "x-request-id": self.random.choice(("r", "", "a b", "é", "r" * 129)),
        }
        if self.is_odd():
            fields.append(self.field(*self.random.choice(list(odd.items()))))
        return self.mutated(self.head(line, fields).encode("latin-1") + body)

    def answer(self) -> bytes:
        body = self.value().encode("utf-8")
        line = self.either(
            ("HTTP/1.1 200 OK", "HTTP/1.1 200", "HTTP/1.1 200 ", "HTTP/1.1 200 \té"),
            ("HTTP/1.0 200 OK", "HTTP/1.1 201 Created", "HTTP/1.1 2000", "HTTP/1.1 200\tOK"),
        )
        fields = [self.field("content-length", self.length(body))]
        usual = {
            "connection": ("keep-alive", "Keep-Alive"),
            "content-type": ("application/json", "text/event-stream"),
            "date": ("Mon, 01 Jan 2024 00:00:00 GMT",),
            "keep-alive": ("timeout=5",),
            "proxy-authenticate": ("a",),
            "proxy-authentication-info": ("a",),
            "proxy-connection": ("keep-alive",),
            "proxy-connections": ("kept",),
            "server": ("uvicorn", "é"),
            "servers": ("kept",),
            "te": ("a",),
            "tea": ("kept",),
            "trailer": ("x",),
            "upgrade": ("h2c",),
            "x-mural": ("kept",),
            "x-mural-": ("",),
            "x-mural-digest": ("sha256:00",),
            "x-mural-retry": ("elsewhere",),
            "x-request-id": ("r",),
            "x-": ("kept",),
            "x": ("kept", ""),
            "x-long": ("y" * 900,),
        }
        for name, values in usual.items():
            if self.random.random() < 0.25:
                fields.append(self.field(name, self.random.choice(values)))
        odd = (
            *(("connection", "close"), ("connection", "keep-alive, tea"), ("connection", "x")),
            *(("transfer-encoding", "chunked"), ("content-length", "1")),
        )
        if self.is_odd():
            fields.append(self.field(*self.random.choice(odd)))
        return self.mutated(self.head(line, fields).encode("latin-1") + body)

    def mutated(self, data: bytes) -> bytes:
        """With a byte or a part flipped, cut, put in or doubled, or with its length made right."""
        random = self.random
        for _ in range(random.choice((0, 0, 0, 0, 1, 1, 2))):
            at = random.randrange(len(data) + 1)
            to = min(len(data), at + random.choice((0, 1, 1, 2, 8, 40)))
            part = random.choice(
                (
                    *(b"", data[at:to] * 2, bytes([random.randrange(256)]), b'"', b"\\", b"\0"),
                    *(b"\r\n", b" ", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
                    *(b'"model"', b"\\u006d", b"1", b",", b"}", b"["),
                )
            )
            data = data[:at] + part + data[to:]
        if random.random() < 0.5:
            data = with_true_length(data)
        return data


def with_true_length(data: bytes) -> bytes:
    """Mutations of a body would else be refused for its length alone."""
    head, end, body = data.partition(END)
    lines = head.split(b"\r\n")
    for index, line in enumerate(lines):
        name, colon, value = line.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            lines[index] = name + colon + b"%d" % len(body)
    return b"\r\n".join(lines) + end + body
