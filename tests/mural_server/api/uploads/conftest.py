"""The fixtures of `uploading`, for the tests of this folder."""

from __future__ import annotations

from tests.mural_server.api.uploads import uploading

keys = uploading.keys
places = uploading.places
start_uploads = uploading.start_uploads
uploader = uploading.uploader
intakes = uploading.intakes
adapter = uploading.adapter
other = uploading.other
