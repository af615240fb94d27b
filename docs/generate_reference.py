"""Write the reference pages that follow from the code: flags, settings, metrics, errors, CRDs.

``python docs/generate_reference.py`` writes them, ``--check`` fails (exit status 1) if one of them
no longer says what the code does.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from prometheus_client.parser import text_string_to_metric_families

from mural_operator.metrics import Metrics as OperatorMetrics
from mural_resolvers import errors
from mural_resolvers.audit import AuditLog, AuditNumbers
from mural_resolvers.commands.adapters import adapters
from mural_resolvers.errors import MuralError
from mural_resolvers.tenants import TenantAccounts, TenantsFile
from mural_resolvers.watched_file import WatchNumbers
from mural_router.admin.app import create_admin_app
from mural_router.commands import route
from mural_router.config import Config
from mural_router.http.settings import HttpSettings, TlsSettings
from mural_router.limits.local import LocalLimiter
from mural_router.placement import PlacementPolicy
from mural_router.routing.breaker import BreakerSettings
from mural_router.routing.retry import RetrySettings
from mural_router.routing.versions import VersionSettings
from mural_router.running import Router
from mural_router.settings import (
    RELOADED,
    Discovered,
    Queueing,
    RouterSettings,
    Secrets,
    SharedLimits,
)
from mural_router.up import up
from mural_server import settings
from mural_server.api import errors as api_errors
from mural_server.api.admission import Admission
from mural_server.api.metrics import AccessCollector, Metrics
from mural_server.api.traffic import Traffic
from mural_server.catalog import AdapterCatalog, AdapterView, AlreadyLoaded
from mural_server.commands import serve
from mural_server.engine.client import EngineClient
from mural_server.engine.messages import AdapterInfo, EngineStats

ERROR_MODULES = {errors.__name__, api_errors.__name__, AlreadyLoaded.__module__}
REFERENCE = Path(__file__).resolve().parent / "reference"
Schema = Mapping[str, Any]
NOTE = "<!-- Written by docs/generate_reference.py; change the code instead. -->\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args(argv).check
    stale = [name for name, text in pages() if not _settle(REFERENCE / name, text, check=check)]
    for name in stale:
        print(f"docs/reference/{name} is stale: run docs/generate_reference.py", file=sys.stderr)
    return 1 if stale else 0


def pages() -> Iterator[tuple[str, str]]:
    """Every generated page: its file name and its text."""
    writers: dict[str, Callable[[], str]] = {
        "cli.md": cli_page,
        "settings.md": settings_page,
        "metrics.md": metrics_page,
        "errors.md": errors_page,
        "router.md": router_page,
        "custom-resources.md": custom_resources_page,
    }
    for name, write in writers.items():
        yield name, write()


def _settle(path: Path, text: str, *, check: bool) -> bool:
    if check:
        return path.exists() and path.read_text(encoding="utf-8") == text
    path.write_text(text, encoding="utf-8")
    return True


# Flags


def cli_page() -> str:
    """``mural serve``'s flags, from its own parser."""
    parser = argparse.ArgumentParser(prog="mural serve")
    serve.add_arguments(parser)
    parts = [
        NOTE,
        "# Command line\n",
        "```text\nmural serve [MODEL] [flags]\n```\n",
        "Serves a base model and its tenants' adapters over HTTP. Exit status: 0 after a drain, 1 "
        "when it cannot start or the engine core died, 2 for a flag that does not exist or "
        "cannot take its value.\n",
        "`BYTES` is a number with an optional unit: `536870912`, `512Mi`, `2G`.\n",
    ]
    for group in parser._action_groups:
        rows = [_flag_row(action) for action in group._group_actions if action.dest != "help"]
        if rows:
            title = "Model path" if group.title == "positional arguments" else group.title or ""
            parts += [f"## {title[:1].upper()}{title[1:]}\n", _table(("Flag", "Meaning"), rows)]
    return "\n".join([*parts, *_adapters_parts(), ENVIRONMENT])


ADAPTERS = """\
## Adapters from the command line: `mural adapters`

[Publish an adapter](../how-to/publish-an-adapter.md) shows it at work. Exit status: 0 done, 1 \
refused or failed (the reason is on stderr), 2 wrong usage. A progress bar is drawn on stderr \
where that is a terminal. With `--json` a failure is \
`{"error": {"message", "type", "param", "code"}}` with [the API's codes](errors.md). Every action \
takes:
"""


def _adapters_parts() -> Iterator[str]:
    """The actions of ``mural adapters``: what all take, then what each takes and prints."""
    parser = argparse.ArgumentParser(prog="mural adapters")
    adapters.add_arguments(parser)
    (actions,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    shared = {"--help", "--json", "--store", "--api-key-file"}
    head = ("Argument", "Meaning")
    yield ADAPTERS
    common = actions.choices["ls"]._actions
    yield _table(head, [_flag_row(a) for a in common if shared.intersection(a.option_strings)][1:])
    for name, action in actions.choices.items():
        yield f"### `mural adapters {name}`\n\n{action.description}\n"
        rows = [_flag_row(a) for a in action._actions if not shared.intersection(a.option_strings)]
        yield _table(head, rows)
        keys = " ".join((action.epilog or "").partition(". What fails")[0].split())
        yield f"{keys.replace('--json prints one object:', '`--json` prints')}.\n"


ENVIRONMENT = """\
## Environment

| Variable | Stands for |
|---|---|
| `MURAL_API_KEY` | one more `--api-key`, kept out of the list of processes; for `mural adapters` \
the key for a server |
| `MURAL_STORE` | `--store` of `mural adapters` |
| `MURAL_CONTROL_TOKEN` | the control API's token, as `--control-token-file` |
| `MURAL_ROUTER_TOKEN` | the token that proves a router, as `--router-token-file` |
| `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` | `--allow-runtime-lora-updating` |

## Other subcommands

| Command | Does |
|---|---|
| `mural tenants create-key TENANT [--file FILE] [--new-tenant] [--expires WHEN] [--note TEXT]` | \
makes an API key, shows it once, and puts its record into the file or prints it |
| `mural tenants create-key --admin [--file FILE]` | makes an admin's key |
| `mural tenants revoke-key KEY_ID --file FILE` | takes a key out of the file |
| `mural tenants list --file FILE [--json]` | shows the keys of a file |
| `mural tenants check FILE` | says whether a server would take the file |
| `mural chart apply-crds DIR` | applies custom resource definitions: the chart's hook before an \
upgrade |
| `mural chart release-adapters NAME [--watch-namespace NAME … \\| --all-namespaces]` | stops the \
operator of a Deployment and takes its finalizer off Adapters: the hook before an uninstall |
| `mural --version` | prints the version |
"""


def _flag_row(action: argparse.Action) -> tuple[str, str]:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or _metavar(action)
    value = ""
    if action.choices is not None:
        value = " " + " \\| ".join(f"`{choice}`" for choice in action.choices)
    elif action.nargs != 0 and action.option_strings:
        value = f" {_metavar(action)}"
    return names + value, _cell(action.help or "")


def _metavar(action: argparse.Action) -> str:
    metavar = str(action.metavar or action.dest.upper())
    # A pipe inside a code span of a table cannot be escaped.
    return f"`{metavar}{' …' if action.nargs == '+' else ''}`".replace("|", "` or `")


# Settings


def settings_page() -> str:
    """The fields of the two settings classes, with the texts that stand beside them.

    A field whose name says it all has its flag's text.
    """
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = {action.dest: action.help or "" for action in parser._actions}
    parts = [
        NOTE,
        "# Settings\n",
        "What the flags of [`mural serve`](cli.md) set. `LLM(model, **options)` takes the engine's "
        "by the same names. Each class is checked as a whole before anything starts; a "
        "combination that cannot work is refused with a sentence that says what to change "
        "(`server/mural_server/settings.py`).\n",
    ]
    titles = {"EngineSettings": "Engine", "ServerSettings": "Server"}
    tree = ast.parse(inspect.getsource(settings))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in titles:
            parts += [
                f"## {titles[node.name]}: `{node.name}`\n",
                _table(("Field", "Type", "Default", "Meaning"), _field_rows(node.body, flags)),
            ]
    return "\n".join(parts)


# The router


ROUTER = """\
# The router

[Run a router](../how-to/run-a-router.md) shows it at work.

```text
mural route [flags]
mural up [MODEL] [flags]
```

Exit status of both: 0 after a drain, 1 when it cannot start or go on, 2 for wrong usage.
"""


def router_page() -> str:
    """The router's flags, settings and metrics."""
    parts = [NOTE, ROUTER]
    for name, command in (("route", route), ("up", up)):
        parser = argparse.ArgumentParser(prog=f"mural {name}")
        command.add_arguments(parser)
        rows = [_flag_row(action) for action in parser._actions if action.dest != "help"]
        parts += [f"## `mural {name}`\n", _table(("Flag", "Meaning"), rows)]
    parts.append(
        "## Settings: `--config FILE`\n\nYAML; what stands under a name of this table with a table "
        "of its own is a mapping. Those marked * take effect when the file changes.\n"
    )
    parts.append(_table(("Setting", "Type", "Default", "Meaning"), _router_rows()))
    parts.append(
        "## Metrics\n\n`GET /metrics` on the admin port. Labels are bounded: replicas by the "
        "fleet, versions by `metrics_adapters`, the rest by a list in the code.\n"
    )
    parts.append(_table(("Name", "Type", "Labels", "Meaning"), asyncio.run(_router_metrics())))
    return "\n".join(parts)


def _router_rows() -> Iterator[tuple[str, ...]]:
    for kind, prefix in ROUTER_STRUCTS:
        tree = ast.parse(inspect.getsource(kind)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for name, annotation, default, meaning in _field_rows(tree.body, {}):
            shown = name
            if not prefix and name.strip("`") in RELOADED:
                shown = f"{name} *"
            elif prefix:
                shown = f"`{prefix}.{name.strip('`')}`"
            if annotation.strip("`") not in {struct.__name__ for struct, _ in ROUTER_STRUCTS}:
                yield shown, annotation, default, meaning


ROUTER_STRUCTS = (
    (RouterSettings, ""),
    (HttpSettings, "http"),
    (TlsSettings, "http.tls"),
    (Discovered, "fleet"),
    (SharedLimits, "redis"),
    (Queueing, "queue"),
    (VersionSettings, "versions"),
    (RetrySettings, "retry"),
    (BreakerSettings, "breaker"),
    (PlacementPolicy, "placement"),
)


async def _router_metrics() -> list[tuple[str, ...]]:
    router = Router(Config(None, {}, Secrets()), LocalLimiter())
    create_admin_app(router)
    rows: list[tuple[str, ...]] = []
    for family in router.metrics.families():
        # The classes that Prometheus' client makes families of have no public name for this.
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{name}`", family.type, labels, _cell(family.documentation)))
    await router.close()
    return rows


def _field_rows(body: Sequence[ast.stmt], flags: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    for at, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign):
            continue
        after = body[at + 1] if at + 1 < len(body) else None
        text = flags.get(ast.unparse(node.target), "")
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        default = "required" if node.value is None else f"`{ast.unparse(node.value)}`"
        kind = _kind(ast.unparse(node.annotation))
        yield f"`{ast.unparse(node.target)}`", kind, default, _cell(text)


def _kind(annotation: str) -> str:
    """An annotation for readers: the values of a choice, plain types as they are."""
    name, _, optional = annotation.partition(" | ")
    choices = get_args(getattr(settings, name, None))
    if choices:
        shown = ", ".join(f"`{choice!r}`" for choice in choices)
        return f"{shown}, `{optional}`" if optional else shown
    # A pipe inside a code span of a table cannot be escaped.
    return " or ".join(f"`{part}`" for part in annotation.split(" | "))


# Metrics


class _Engine:
    """An engine client with one adapter at work, for a scrape in which every series is there."""

    def stats(self) -> EngineStats:
        adapter = AdapterInfo(
            name="acme:v1", lora_int_id=1, digest="0" * 64, rank=8, bytes=1, level="slot"
        )
        return EngineStats(adapters=[adapter], running_adapters=["acme:v1"])

    @property
    def info(self) -> object:
        return type("Info", (), {"block_size": 16, "num_blocks": 2, "max_loras": 8})

    alive = True


class _Catalog:
    served = ("base",)

    def view(self) -> list[AdapterView]:
        return [
            AdapterView(name="acme:v1", digest="0" * 64, path="", rank=8, bytes=1, state="slot")
        ]


class _TenantsFile:
    numbers = WatchNumbers(loaded_at=datetime.fromtimestamp(0, UTC))


class _Audit:
    numbers = AuditNumbers()


def metrics_page() -> str:
    """Every family of a scrape."""
    metrics = Metrics(
        cast(EngineClient, _Engine()),
        cast(AdapterCatalog, _Catalog()),
        Admission(1),
        Traffic(),
        max_adapter_labels=1,
    )
    tenants = cast(TenantsFile, _TenantsFile())
    metrics.add(AccessCollector(tenants, TenantAccounts(), cast(AuditLog, _Audit())))
    metrics.finished("stop")
    metrics.error(404)
    metrics.traffic.add("acme:v1", 1)
    metrics.adapter_tokens.add("acme:v1", 1, 1)
    rows = _family_rows(metrics.exposition())
    intro = (
        "`GET /metrics` on the server's port, in Prometheus' text format, without a key. Names "
        "that begin with `vllm:` are those that gateways and dashboards read from vLLM; `level` is "
        "`gpu` for a slot and `cpu` for host memory, whatever the device. What begins with "
        "`mural:` is Mural's own.\n"
    )
    adapters = (
        "The per-adapter counters have a label for the busiest `--metrics-adapters` names; the "
        "rest is counted under `other`, so that the number of series is bounded.\n"
    )
    operator = (
        "## The operator\n\n`GET /metrics` on its admin port, beside `process_*`. Labels are "
        "bounded: by the pools, or by lists in the code. The router's stand on [its own "
        "page](router.md).\n"
    )
    head = ("Name", "Type", "Labels", "Meaning")
    tables = [intro, _table(head, rows), adapters, operator, _table(head, _operator_rows())]
    return "\n".join([NOTE, "# Metrics\n", *tables])


def _family_rows(exposition: bytes) -> list[tuple[str, ...]]:
    rows = []
    for family in text_string_to_metric_families(exposition.decode()):
        if not family.name.endswith("_created") and not family.name.startswith("process_"):
            labels = sorted({label for sample in family.samples for label in sample.labels})
            shown = ", ".join(f"`{label}`" for label in labels if label != "le")
            name = f"{family.name}_total" if family.type == "counter" else family.name
            rows.append((f"`{name}`", family.type, shown, _cell(family.documentation)))
    return rows


class _Watch:
    synced = fresh = True


def _operator_rows() -> list[tuple[str, ...]]:
    """The families of a scrape in which every series is there."""
    metrics = OperatorMetrics(
        watches=lambda: {"adapters": _Watch()},
        calls=lambda: {"get": 1},
        leading=lambda: True,
        adapters=lambda: {("Ready", "True"): 1},
    )
    metrics.reconciled("pool", 0.0)
    metrics.acted("Load", 0.0, refused=404)
    metrics.wrote_status("Adapter", "ok")
    metrics.recorded("Normal")
    return _family_rows(metrics.exposition())


# Errors


def errors_page() -> str:
    """Every error class of the API and of what it answers from."""
    rows: dict[tuple[int, str, str], str] = {}
    # Of classes that look alike from outside, the most general says it for all.
    for error in sorted(set(_subclasses(MuralError)), key=lambda e: (len(e.mro()), e.__name__)):
        meaning = (inspect.getdoc(error) or "").partition("\n")[0]
        rows.setdefault((error.status, error.code, error.type), _cell(meaning))
    lines = [
        (str(status), f"`{code}`", f"`{kind}`", meaning)
        for (status, code, kind), meaning in sorted(rows.items())
    ]
    intro = (
        "Every refusal is an OpenAI error body, on the control port too:\n\n"
        "```json\n"
        '{"error": {"message": "…", "type": "invalid_request_error", '
        '"param": "model", "code": "model_not_found"}}\n'
        "```\n\n"
        "429 and 503 carry `Retry-After` in seconds where waiting helps. A user's input never "
        "gives 500. An error after a stream's first token comes as a `data:` line with this body, "
        "and no `[DONE]` follows it.\n"
    )
    table = _table(("Status", "`code`", "`type`", "When"), lines)
    extra = "A prompt that does not fit the context is 400 with `code` `context_length_exceeded`.\n"
    return "\n".join([NOTE, "# Error codes\n", intro, table, extra])


def _subclasses(kind: type[MuralError]) -> Iterator[type[MuralError]]:
    """Those of the named modules alone: others appear as soon as something imports them."""
    for sub in kind.__subclasses__():
        if sub.__module__ in ERROR_MODULES:
            yield sub
        yield from _subclasses(sub)


# Markdown


# Custom resources


CRDS = Path(__file__).resolve().parents[1] / "charts/mural/crds"
KINDS = ("adapters", "adapteraliases", "servingpools", "tenants")

CUSTOM_RESOURCES = """\
# Custom resources

Of the group `mural.dev`, version `v1alpha1`, as `charts/mural/crds` declares them; `kubectl \
explain adapter.spec` says the same. Pools and tenants live in the operator's namespace, adapters \
and aliases in every namespace that their `Tenant` lists. `kubectl get mural` shows all four.

A field that is not listed here is refused by name. A bound or a rule that is broken is told with \
the field's path. What stands in a status is the operator's alone: [Condition \
reasons](conditions.md) says what each reason asks for.
"""


def custom_resources_page() -> str:
    """The fields of each kind, from its schema."""
    parts = [NOTE, CUSTOM_RESOURCES]
    for plural in KINDS:
        spec = yaml.safe_load((CRDS / f"{plural}.yaml").read_text(encoding="utf-8"))["spec"]
        (version,) = spec["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        fields, names = schema["properties"], spec["names"]
        head = ("Field", "Type", "Default", "Meaning")
        parts += [
            f"## {names['kind']}\n",
            f"{schema['description']} `kubectl get {names['shortNames'][0]}` shows "
            f"{_columns(version['additionalPrinterColumns'])}.\n",
            _table(head, _schema_rows(fields["spec"], "spec")),
            _rules(schema),
            "Its status:\n",
            _table(head[:2] + head[3:], _status_rows(fields["status"])),
        ]
    return "\n".join(parts)


def _columns(columns: Iterable[Schema]) -> str:
    plain, wide = (
        ", ".join(f"`{each['name']}`" for each in columns if bool(each.get("priority")) is more)
        for more in (False, True)
    )
    return f"{plain}, and with `-o wide` {wide}" if wide else plain


def _schema_rows(schema: Schema, path: str) -> Iterator[tuple[str, str, str, str]]:
    """One row for each field below, those of lists' items as ``field[].name``."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = "required" if name in required else _schema_default(field)
        meaning = f"{field['description']}{_pattern(field)}"
        yield f"`{here}`", _schema_type(field), default, _cell(meaning)
        items = field.get("items")
        yield from _schema_rows(items or field, f"{here}[]" if items else here)


def _status_rows(schema: Schema) -> Iterator[tuple[str, str, str]]:
    for field, kind, _, meaning in _schema_rows(schema, "status"):
        if not field.startswith("`status.conditions[]"):
            yield field, kind, meaning


def _schema_default(field: Schema) -> str:
    default = field.get("default")
    if default is None or default == {}:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _schema_type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = field["type"]
    if kind == "array":
        inner = _schema_type(field["items"])
        most = f", at most {field['maxItems']}" if "maxItems" in field else ""
        return f"list of {inner}s{most}" if inner in ("string", "object") else f"list{most}"
    if kind == "object":
        return "map of strings" if "additionalProperties" in field else "object"
    if field.get("format") == "date-time":
        return "time"
    least, most = field.get("minimum"), field.get("maximum")
    if least is None:
        return str(kind)
    above = f"above {least}" if field.get("exclusiveMinimum") else f"from {least}"
    return f"{kind}, {above}{'' if most is None else f' to {most}'}"


def _pattern(field: Schema) -> str:
    pattern = field.get("pattern") or field.get("items", {}).get("pattern")
    # A pipe inside a code span of a table cannot be escaped.
    return f" Matches `{pattern}`." if pattern and "|" not in pattern else ""


def _rules(schema: Schema) -> str:
    """The sentences of the schema's rules, each once."""
    found = dict.fromkeys(_messages(schema))
    if not found:
        return ""
    return "Refused with a sentence:\n\n" + "".join(f"- {message}\n" for message in found)


def _messages(schema: Schema) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"].replace("*", "\\*")
    for field in schema.get("properties", {}).values():
        yield from _messages(field)
    if "items" in schema:
        yield from _messages(schema["items"])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    """One line for a table: line ends, pipes and reST's double backquotes put right."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
