"""What a store's refusals and failures mean: botocore's and aiohttp's errors as ours.

Nothing of what a store says is repeated but its error code: its messages name keys, signatures
and the string that was signed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mural_resolvers.errors import Conflict, Forbidden, InvalidInput, MuralError, Unavailable

try:
    import aiobotocore as aiobotocore
    import aiohttp
    import botocore.exceptions as boto
except ImportError as error:
    raise InvalidInput("An S3 store needs aiobotocore: pip install 'mural[s3]'.") from error

__all__ = ["CredentialsRefused", "ObjectChanged", "ObjectMissing", "is_missing", "mapped"]

_CODE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

# The store does not know us, or does not believe that it is us.
_CREDENTIALS = frozenset(
    {
        "AccountProblem",
        "AuthorizationHeaderMalformed",
        "AuthorizationQueryParametersError",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidToken",
        "MissingAuthenticationToken",
        "MissingSecurityHeader",
        "NotSignedUp",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
        "XAdminUserNotFound",  # versitygw without its own users
    }
)
_MISSING = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound", "404"})
_CHANGED = frozenset(
    {"ConditionalRequestConflict", "InvalidRange", "NotModified", "PreconditionFailed"}
)
_SLOW = frozenset(
    {
        "BandwidthLimitExceeded",
        "RequestLimitExceeded",
        "RequestThrottled",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.NoAuthTokenError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.LoginError,
)
_SETTINGS = (
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.ConfigNotFound,
    boto.InvalidProxiesConfigError,
    boto.InvalidEndpointConfigurationError,
    boto.EndpointProviderError,
    boto.InvalidRegionError,
    boto.NoRegionError,
    boto.InvalidConfigError,
)
_MAX_RETRY_AFTER_S = 60.0


class CredentialsRefused(Forbidden):
    """The store refuses the credentials that it was given, or there were none to give."""


class ObjectChanged(Conflict):
    """An object is not, or is no longer, the one that a condition was put on."""


class ObjectMissing(ObjectChanged):
    """An object that was there is gone."""


def is_missing(error: Exception) -> bool:
    """Whether the store says that there is no such object."""
    return isinstance(error, boto.ClientError) and _code(error) in _MISSING


def mapped(error: Exception, *, retry_after_s: float | None = 1.0) -> MuralError:
    """Give our error for one of botocore, aiohttp or the network; raise what is none of them.

    ``retry_after_s`` is for failures of which the store itself does not say when to come back.
    """
    if isinstance(error, boto.ClientError):
        return _mapped_answer(error, retry_after_s)
    if isinstance(error, _NO_CREDENTIALS):
        return CredentialsRefused("No credentials for the store of adapters were found.")
    if isinstance(error, _SETTINGS):
        return InvalidInput(f"The store's settings cannot be used: {type(error).__name__}.")
    if isinstance(error, boto.SSLError | aiohttp.ClientSSLError):
        return _unavailable("The store of adapters has a certificate that is not trusted.")
    if isinstance(error, TimeoutError | boto.ReadTimeoutError | boto.ConnectTimeoutError):
        return Unavailable(
            "The store of adapters did not answer in time.", retry_after_s=retry_after_s
        )
    if isinstance(error, boto.ParamValidationError):
        raise error
    if isinstance(error, boto.BotoCoreError | aiohttp.ClientError | OSError):
        return Unavailable(
            f"The connection to the store of adapters failed ({type(error).__name__}).",
            retry_after_s=retry_after_s,
        )
    raise error


def _mapped_answer(error: boto.ClientError, retry_after_s: float | None) -> MuralError:
    code, status = _code(error), _status(error)
    if code in _CREDENTIALS or status == 401:
        return CredentialsRefused(f"The store of adapters refuses its credentials ({code}).")
    if code in _MISSING:
        return ObjectMissing("The object in the store is gone.")
    if code in _CHANGED or status in (304, 412, 416):
        return ObjectChanged("The object in the store has changed.")
    if code in _SLOW or status in (429, 503):
        asked_s = _retry_after_s(error)
        return Unavailable("The store of adapters is overloaded.", retry_after_s=asked_s or 1.0)
    if code == "NoSuchBucket":
        return _unavailable("The bucket of adapters does not exist.")
    if status == 403:
        return Forbidden(f"The store of adapters refuses access ({code}).")
    if status == 409:
        return ObjectChanged(f"The store of adapters sees a conflict ({code}).")
    return Unavailable(f"The store of adapters answered {code}.", retry_after_s=retry_after_s)


def _unavailable(message: str) -> Unavailable:
    # Nothing that passes in a second.
    return Unavailable(message, retry_after_s=10.0)


def _code(error: boto.ClientError) -> str:
    code = str(error.response.get("Error", {}).get("Code", ""))
    # A store may write anything there.
    return code if _CODE.fullmatch(code) else "an unknown error"


def _status(error: boto.ClientError) -> int:
    metadata: Mapping[str, object] = error.response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode")
    return status if isinstance(status, int) else 0


def _retry_after_s(error: boto.ClientError) -> float | None:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    text = str(headers.get("retry-after", ""))
    return min(float(text), _MAX_RETRY_AFTER_S) if text.isascii() and text.isdigit() else None
