"""What must import alone does; deciding needs the standard library only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from infra.embedded.paths import PROJECT

BLOCKED = """
import importlib, sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
importlib.import_module(sys.argv[1])
"""


def import_without(module: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, module, ",".join(blocked)]
    return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=60)


@pytest.mark.parametrize("module", ["workers.spec", "workers.protocol", "scheduler.core"])
def test_contracts_and_core_import_without_django_ray_and_torch(module: str) -> None:
    done = import_without(module, "django", "ray", "torch")
    assert done.returncode == 0, done.stderr


def test_the_block_blocks() -> None:
    done = import_without("backend.settings", "django")
    assert "django" in done.stderr
    assert "is blocked" in done.stderr


def test_sweep_needs_the_standard_library_only() -> None:
    done = import_without("infra.embedded.sweep", "django", "psycopg", "redis", "ray", "pydantic")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((PROJECT / "scheduler" / "core").rglob("*.py")), ids=lambda p: p.stem)
def test_scheduler_core_imports_the_standard_library_only(path: Path) -> None:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add("." * node.level + (node.module or ""))
    foreign = {
        root
        for root in roots
        if root.partition(".")[0] not in sys.stdlib_module_names
        and not root.startswith((".", "scheduler.core"))
    }
    assert foreign == set()
