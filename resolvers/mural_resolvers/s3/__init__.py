"""Adapters in a bucket of an S3 store: a source of them, and a store to publish them in."""

# First: it says so where aiobotocore is not installed.
from mural_resolvers.s3.answers import CredentialsRefused
from mural_resolvers.s3.resolver import S3Resolver
from mural_resolvers.s3.settings import S3Settings
from mural_resolvers.s3.store import S3Store

__all__ = ["CredentialsRefused", "S3Resolver", "S3Settings", "S3Store"]
