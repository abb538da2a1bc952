"""The web process: ``uvicorn backend.asgi:application``."""

import os
import tempfile

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
django = get_asgi_application()

# These read the settings.
from django.conf import settings  # noqa: E402

from backend.api.body_limit import BodyLimit  # noqa: E402

# Django's handler stores bodies in the default folder, whatever FILE_UPLOAD_TEMP_DIR says.
tempfile.tempdir = settings.FILE_UPLOAD_TEMP_DIR
application = BodyLimit(django)
