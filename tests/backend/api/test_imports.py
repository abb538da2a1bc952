"""The web process runs where the workers' packages are not installed."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = ("torch", "ray", "transformers", "numpy", "safetensors", "gguf", "peft", "plotly")
SCRIPT = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
import backend.asgi, backend.urls, backend.celery
from django.core.management import call_command
call_command("check")
backend.celery.app.loader.import_default_modules()
assert "backend.jobs.tasks.validate_job" in backend.celery.app.tasks
beat = backend.celery.app.conf.beat_schedule
assert all(entry["task"] in backend.celery.app.tasks for entry in beat.values()), beat
from django.urls import reverse
print(reverse("api:jobs"))
"""


def test_web_and_celery_start_without_torch_and_ray():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/v1/fine_tuning/jobs")
