"""moto's S3 server in a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


@contextmanager
def moto_s3() -> Iterator[int]:
    """Its port on 127.0.0.1. What is in its buckets stays in this process.

    S3 alone: moto's own server looks through its hundred services' folders at each request, which
    takes a third of the request's time, and ends within half a second only.
    """
    handler = MotoRequestHandler
    app = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
