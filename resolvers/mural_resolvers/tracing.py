"""OpenTelemetry spans, where somebody asked for them: off by default, and then nothing is imported.

What crosses processes is W3C's ``traceparent``. Spans hold names, numbers and statuses: no prompt,
no key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from mural_resolvers.errors import InvalidInput
from mural_resolvers.redaction import holds_secret, redacted

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

__all__ = ["Trace", "Tracing", "check_tracing", "open_tracing"]

FLUSH_MS: Final = 2_000

Value = str | bool | int | float


class Trace:
    """One span, from its start to `end`."""

    __slots__ = ("_span", "headers")

    def __init__(self, span: Span, headers: Mapping[str, str]) -> None:
        self._span = span
        self.headers = headers
        """``traceparent`` and ``tracestate`` for whoever is asked next."""

    def set(self, **values: Value | None) -> None:
        """Note attributes, ``mural.`` before their names; None is left out."""
        for name, value in values.items():
            if value is not None:
                shown = redacted(value) if isinstance(value, str) else value
                self._span.set_attribute(f"mural.{name}", shown)

    def event(self, name: str) -> None:
        """Note that something happened now."""
        self._span.add_event(name)

    def end(self, *, status: int, error: str | None = None) -> None:
        """End the span; a status from 500 on, or an error, marks it as failed."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if error is not None or status >= 500:
            shown = None if error is None else redacted(error)
            self._span.set_status(Status(StatusCode.ERROR, shown))
        self._span.end()


class Tracing:
    """Makes spans of one service and sends them in the background."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("mural")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, headers: Mapping[str, str]) -> Trace:
        """Begin a span under the one that a request's headers (lower-case names) tell of."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        # Vendors' state is the caller's own text, and leaves with the span.
        carrier = {
            name: headers[name]
            for name in ("traceparent", "tracestate")
            if name in headers and not holds_secret(headers[name])
        }
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(redacted(name), context=parent, kind=SpanKind.SERVER)
        onward: dict[str, str] = {}
        self._propagator.inject(onward, set_span_in_context(span, parent))
        return Trace(span, onward)

    def close(self) -> None:
        """Send what is waiting, in bounded time. Blocks: call it on a thread."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


def check_tracing() -> None:
    """Raise ``InvalidInput`` where the packages are not installed."""
    try:
        import opentelemetry.exporter.otlp.json.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401 - both, for `open_tracing`
    except ImportError as error:
        raise InvalidInput(
            f"Tracing needs a package that is not installed ({error.name}): "
            "pip install 'mural[otel]'."
        ) from None


def open_tracing(
    endpoint: str,
    service: str,
    *,
    sample_ratio: float = 1.0,
    exporter: Callable[[], SpanExporter] | None = None,
) -> Tracing:
    """Send spans to an OTLP endpoint, as JSON over HTTP (``http://collector:4318/v1/traces``).

    ``sample_ratio`` holds for traces that begin here; others are as their caller decided. Raises
    ``InvalidInput`` where the packages are not installed.
    """
    check_tracing()
    from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create({"service.name": service}),
    )
    made = OTLPSpanExporter(endpoint=endpoint) if exporter is None else exporter()
    provider.add_span_processor(BatchSpanProcessor(made))
    return Tracing(provider)
