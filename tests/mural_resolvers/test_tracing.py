"""Spans as OpenTelemetry's own exporter gets them."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from mural_resolvers.errors import InvalidInput
from mural_resolvers.tenants import mint_key
from mural_resolvers.tracing import open_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-2] + "00"


def spans_of(act, *, sample_ratio: float = 1.0):
    exporter = InMemorySpanExporter()
    tracing = open_tracing(
        "http://unused", "mural-test", sample_ratio=sample_ratio, exporter=lambda: exporter
    )
    result = act(tracing)
    # Ending sends what is waiting; the exporter keeps what it was sent.
    tracing.close()
    return exporter.get_finished_spans(), result


def test_a_span_hangs_under_its_callers_and_passes_itself_on():
    def act(tracing):
        trace = tracing.start("POST /v1/completions", {"traceparent": PARENT})
        trace.set(adapter="acme:v1", attempts=2, digest=None)
        trace.event("attempt failed: connect")
        trace.end(status=200)
        return trace.headers["traceparent"]

    (span,), onward = spans_of(act)
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert onward.split("-")[2] == f"{span.context.span_id:016x}"
    assert span.attributes["mural.adapter"] == "acme:v1"
    assert "mural.digest" not in span.attributes
    assert span.attributes["http.response.status_code"] == 200
    assert span.events[0].name.startswith("attempt failed")
    assert span.resource.attributes["service.name"] == "mural-test"


def test_an_error_or_a_status_from_500_on_marks_the_span():
    def act(tracing):
        for status, error in ((503, None), (200, "the replica broke off"), (404, None)):
            tracing.start("x", {}).end(status=status, error=error)

    spans, _ = spans_of(act)
    failed = [span.status.status_code is StatusCode.ERROR for span in spans]
    assert failed == [True, True, False]


def test_no_key_of_a_caller_is_in_a_span():
    key = mint_key().key

    def act(tracing):
        for state in (f"a={key}", "a=b"):
            trace = tracing.start(
                f"GET /v1/models/{key}", {"traceparent": PARENT, "tracestate": state}
            )
            trace.set(adapter=key)
            trace.end(status=500, error=f"unknown: {key}")

    spans, _ = spans_of(act)
    assert all(key[-43:] not in span.to_json() for span in spans)
    assert [dict(span.context.trace_state) for span in spans] == [{}, {"a": "b"}]
    assert all(f"{span.parent.span_id:016x}" == PARENT.split("-")[2] for span in spans)


@pytest.mark.parametrize("header", [NOT_SAMPLED, "garbage", "00-0-0-01", "\x00"])
def test_what_the_caller_does_not_sample_or_sends_as_garbage_costs_nothing(header):
    def act(tracing):
        tracing.start("x", {"traceparent": header}).end(status=200)

    spans, _ = spans_of(act, sample_ratio=0.0)
    assert spans == ()


def test_without_the_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidInput, match=r"mural\[otel\]"):
        open_tracing("http://x", "x")
