"""Who is asking, and what they may use: principals, grants, API keys, limits.

``authorize`` is pure and comes before any look-up.
"""

from mural_resolvers.tenants.config import (
    KeyRecord,
    Tenant,
    TenantsConfig,
    convert_key,
    convert_tenant,
    parse_moment,
    parse_tenants,
)
from mural_resolvers.tenants.file import TenantsFile, read_tenants
from mural_resolvers.tenants.keys import (
    KeyRing,
    MintedKey,
    StoredKey,
    hash_key,
    hash_secret,
    mint_key,
)
from mural_resolvers.tenants.limits import TenantAccounts, Ticket
from mural_resolvers.tenants.principal import (
    ADMIN,
    ANYONE,
    UNLIMITED,
    Principal,
    TenantLimits,
    authorize,
    authorize_base,
    is_grant,
    may_use,
    may_use_source,
)

__all__ = [
    "ADMIN",
    "ANYONE",
    "UNLIMITED",
    "KeyRecord",
    "KeyRing",
    "MintedKey",
    "Principal",
    "StoredKey",
    "Tenant",
    "TenantAccounts",
    "TenantLimits",
    "TenantsConfig",
    "TenantsFile",
    "Ticket",
    "authorize",
    "authorize_base",
    "convert_key",
    "convert_tenant",
    "hash_key",
    "hash_secret",
    "is_grant",
    "may_use",
    "may_use_source",
    "mint_key",
    "parse_moment",
    "parse_tenants",
    "read_tenants",
]
