"""Django settings. Everything is read from the environment; with nothing set, the embedded default runs."""

from __future__ import annotations

import os
from pathlib import Path

from django.core.management.utils import get_random_secret_key

from backend import env
from infra.embedded import postgres, valkey
from infra.embedded.paths import scratch_dir, var_dir

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = var_dir()


def _embedded_secret_key() -> str:
    """A key made once and kept in var/, so that sessions survive a restart of the embedded default."""
    path = VAR_DIR / "secret_key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"secret_key.{get_random_secret_key()[:8].encode().hex()}")
        fresh.touch(mode=0o600)
        fresh.write_text(get_random_secret_key())
        try:
            path.hardlink_to(fresh)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_text()


DEBUG = env.flag("JIGSAW_DEBUG", False)
SECRET_KEY = env.secret("JIGSAW_SECRET_KEY") or _embedded_secret_key()
ALLOWED_HOSTS = env.words("JIGSAW_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
CSRF_TRUSTED_ORIGINS = env.words("JIGSAW_CSRF_TRUSTED_ORIGINS", "")

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "rest_framework",
    "django_htmx",
    "backend.common",
    "backend.tenants",
    "backend.catalog",
    "backend.jobs",
    "backend.pool",
    "backend.metering",
    "backend.notify",
    "backend.api",
    "frontend.web",
    "scheduler",
    "infra.embedded",
]

MIDDLEWARE = [
    "backend.api.middleware.request_id",
    "backend.api.health.healthz",
    "django.middleware.security.SecurityMiddleware",
    "frontend.web.middleware.content_security_policy",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "backend.urls"
ASGI_APPLICATION = "backend.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASE_URL = env.secret("DATABASE_URL") or postgres.url(VAR_DIR)
DATABASES = {"default": env.database(DATABASE_URL)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "tenants.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "web:sign_in"
LOGIN_REDIRECT_URL = "web:jobs"
LOGOUT_REDIRECT_URL = "web:sign_in"

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"

STATIC_URL = "static/"
STATIC_ROOT = VAR_DIR / "static"
STATIC_ROOT.mkdir(parents=True, exist_ok=True)
WHITENOISE_USE_FINDERS = True
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}

# Uploads are streamed to disk in chunks; only small ones stay in memory.
FILE_UPLOAD_MAX_MEMORY_SIZE = 1 << 20
FILE_UPLOAD_TEMP_DIR = str(scratch_dir(VAR_DIR))
DATA_UPLOAD_MAX_MEMORY_SIZE = 4 << 20

FILES_DIR = Path(env.text("JIGSAW_FILES_DIR", str(VAR_DIR / "files")))
MODELS_DIR = Path(env.text("JIGSAW_MODELS_DIR", str(VAR_DIR / "models")))
CHECKPOINTS_DIR = Path(env.text("JIGSAW_CHECKPOINTS_DIR", str(VAR_DIR / "checkpoints")))
MAX_UPLOAD_BYTES = env.integer("JIGSAW_MAX_UPLOAD_BYTES", 512 << 20)
# Jobs of one organization that are not over: what waits is read whole by every plan of the scheduler.
MAX_UNFINISHED_JOBS = env.integer("JIGSAW_MAX_UNFINISHED_JOBS", 1_000)

REDIS_URL = env.secret("REDIS_URL") or valkey.url(VAR_DIR)
CELERY_BROKER_URL = valkey.celery_url(REDIS_URL)
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_TASK_TIME_LIMIT = 600
CELERY_TASK_SOFT_TIME_LIMIT = 540
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 3600}
CELERY_TIMEZONE = "UTC"
# Checks take minutes; what comes round every half a minute must not wait for them.
CELERY_TASK_DEFAULT_QUEUE = "periodic"
CELERY_TASK_ROUTES = {
    "backend.jobs.tasks.validate_job": {"queue": "validation"},
    # Somebody waits for these.
    "backend.jobs.trials.try_grader": {"queue": "graders"},
}
CELERY_IMPORTS = ["backend.jobs.trials"]
CELERY_BEAT_SCHEDULE = {
    "jobs.validations_sweep": {
        "task": "backend.jobs.tasks.validations_sweep",
        "schedule": 60.0,
        "options": {"expires": 60.0},
    },
}
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celerybeat-schedule")

SCHEDULER_POLICY = env.text("JIGSAW_POLICY", "lookahead")
# How many times as long as alone a step may take by what is packed beside it: admission keeps to it.
LATENCY_CAP = env.at_least("JIGSAW_LATENCY_CAP", 2.0, least=1.0)
# Two: one job can train on a device while another rolls out there, a thread each.
CPU_DEVICE_THREADS = env.integer("JIGSAW_CPU_DEVICE_THREADS", min(2, os.cpu_count() or 1))
GPU_MEMORY_BYTES = env.integer("JIGSAW_GPU_MEMORY_BYTES", 80 << 30)
# What one hour of one whole device costs, in micro-dollars, by device kind.
DEVICE_PRICE_MICRO_USD_PER_HOUR = {
    "cpu": env.integer("JIGSAW_PRICE_CPU_MICRO_USD_PER_HOUR", 50_000),
    "gpu": env.integer("JIGSAW_PRICE_GPU_MICRO_USD_PER_HOUR", 4_000_000),
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["backend.api.authentication.ApiKeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "EXCEPTION_HANDLER": "backend.api.errors.exception_handler",
    "UNAUTHENTICATED_USER": None,
}

SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"
if env.flag("JIGSAW_HTTPS", False):
    SESSION_COOKIE_SECURE = True
    CSRF_COOKIE_SECURE = True
    SECURE_SSL_REDIRECT = True
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_HSTS_SECONDS = 31_536_000

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": env.text("JIGSAW_LOG_LEVEL", "INFO")},
}
