"""What one running server is made of; the routes get it and nothing else."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from mural_resolvers.audit import AuditLog
from mural_resolvers.tenants import Principal, TenantAccounts
from mural_resolvers.tracing import Tracing
from mural_resolvers.uploads import Uploads
from mural_server.api.admission import Admission
from mural_server.api.auth import Authenticator
from mural_server.api.metrics import Metrics, SourcesCollector
from mural_server.api.readiness import Readiness
from mural_server.api.sampling import SamplingDefaults
from mural_server.api.text import TextPipeline
from mural_server.catalog import AdapterCatalog
from mural_server.engine.client import EngineClient
from mural_server.generation import Generator
from mural_server.settings import ServerSettings

__all__ = ["AppState", "TenantSalts"]


class TenantSalts:
    """Keys that keep one tenant's prefix blocks from another's requests.

    Derived from a secret of this process, so that no tenant can compute another's.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def salt(self, principal: Principal, cache_salt: str | None) -> str:
        """A tenant's salt, narrowed by what the client gave."""
        # The tenant's name holds no NUL, so that no two pairs run into one another.
        text = f"{principal.tenant or ''}\0{cache_salt or ''}"
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True, kw_only=True)
class AppState:
    """One server."""

    settings: ServerSettings
    client: EngineClient
    generator: Generator
    catalog: AdapterCatalog
    texts: TextPipeline
    auth: Authenticator
    admission: Admission
    metrics: Metrics
    sources: SourcesCollector
    audit: AuditLog
    uploads: Uploads | None = None
    tracing: Tracing | None = None
    accounts: TenantAccounts = field(default_factory=TenantAccounts)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    salts: TenantSalts = field(default_factory=TenantSalts)
    readiness: Readiness = field(default_factory=Readiness)
    started_at: int = 0

    @property
    def max_model_len(self) -> int:
        return self.client.info.max_model_len

    def resident(self) -> set[str]:
        """Names whose weights are in memory."""
        return {view.name for view in self.catalog.view() if view.state != "disk"}

    def not_ready(self) -> str | None:
        """Why no request should be sent here, or None."""
        if not self.client.alive:
            return "The engine core has died."
        if not self.admission.accepting:
            return self.admission.refusal
        return self.readiness.waits_for(self.resident)
