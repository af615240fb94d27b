"""What happens to a request before and around its bytes; knows nothing of how they travel.

The proxy and the endpoint picker both ask here.
"""

from mural_router.routing.ask import HEADERS, RETRY_HEADER, Ask, Outcome, Routed, Routing

__all__ = ["HEADERS", "RETRY_HEADER", "Ask", "Outcome", "Routed", "Routing"]
