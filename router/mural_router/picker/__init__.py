"""Mural's routing for an Envoy gateway: an endpoint picker over the ext_proc protocol.

Envoy carries the bytes; it asks here, for each request, where they go and with which headers.
"""

from mural_router.picker.server import Picker, PickerSettings, start_picker

__all__ = ["Picker", "PickerSettings", "start_picker"]
