"""Which names this server answers to, and which weights stand behind each.

A name is looked up in the order of the design: the base's served names, names that an admin
registered, then the grammar ``tenant/adapter:version`` through the resolvers. Authorisation comes
before any look-up. Names with one digest share one ``lora_int_id``, so the weights go with the
last name.

===============  ==============================================================================
``catalog``      what requests and lists see: `AdapterCatalog`
``lookup``       from a name to its content, and whether the sources still have it
``residency``    who uses which weights; their load and their unload
``leases``       what is in use stays in the disk cache
``admin``        registering, loading, pinning, unloading
``names``        the names and what is known of each
===============  ==============================================================================
"""

from mural_server.catalog.admin import AdminActions, AlreadyLoaded
from mural_server.catalog.catalog import AdapterCatalog
from mural_server.catalog.names import OPERATOR, AdapterView, ServedModel

__all__ = [
    "OPERATOR",
    "AdapterCatalog",
    "AdapterView",
    "AdminActions",
    "AlreadyLoaded",
    "ServedModel",
]
