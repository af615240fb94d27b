"""Tenants, Adapters and AdapterAliases as objects, in place of the router's own files.

`Declared` says what they mean together; where they come from is one file each: `file`, and
`kubernetes` (which alone needs the extra).
"""

from mural_router.objects.declared import Declared
from mural_router.objects.file import FileObjects
from mural_router.objects.source import KindState, Objects

__all__ = ["Declared", "FileObjects", "KindState", "Objects"]
