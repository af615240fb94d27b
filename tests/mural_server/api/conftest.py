"""The fixtures of `scripted_server`, for the tests of this folder."""

from __future__ import annotations

from tests.mural_server.api import scripted_server

byte_tokenizer = scripted_server.byte_tokenizer_fixture
engine = scripted_server.engine
start_server = scripted_server.start_server
server = scripted_server.server
adapter_dir = scripted_server.adapter_dir
make_adapter = scripted_server.make_adapter
server_in_thread = scripted_server.server_in_thread
