"""Adapters that tenants upload: taken in under limits, judged, published, gone after a while."""

from mural_resolvers.uploads.archive import ArchiveReader
from mural_resolvers.uploads.intake import UPLOADED_FILES, FileSink, Intake, Quarantine
from mural_resolvers.uploads.record import UPLOAD_FILE, UploadRecord
from mural_resolvers.uploads.resolver import UploadsResolver
from mural_resolvers.uploads.service import (
    BodyReader,
    Judge,
    OpenedFile,
    Upload,
    UploadCounts,
    UploadObserver,
    Uploads,
)
from mural_resolvers.uploads.settings import UploadSettings

__all__ = [
    "UPLOADED_FILES",
    "UPLOAD_FILE",
    "ArchiveReader",
    "BodyReader",
    "FileSink",
    "Intake",
    "Judge",
    "OpenedFile",
    "Quarantine",
    "Upload",
    "UploadCounts",
    "UploadObserver",
    "UploadRecord",
    "UploadSettings",
    "Uploads",
    "UploadsResolver",
]
