"""What a job costs before it computes: its pipeline is a process of its own, and reads no torch."""

from __future__ import annotations

import subprocess
import sys

#: Everything a pipeline imports, and everything that residents answer it with.
CODE = """
import sys
import workers.pipeline
import workers.residents.errors
import workers.residents.mailbox
from workers.rl.sums import Sums, Trained
from workers.timing import Ran
print(sorted({"torch", "transformers", "django"} & set(sys.modules)))
"""


def test_a_pipeline_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
