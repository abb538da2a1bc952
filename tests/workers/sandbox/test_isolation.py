"""Which isolation is used, and the refusal where none works."""

import os

import pytest

from tests.workers.sandbox.helpers import CALL, LENGTH
from workers.sandbox import isolation as isolations
from workers.sandbox import probe
from workers.sandbox.child import landlock
from workers.sandbox.isolation import Isolation
from workers.sandbox.pool import SandboxPool, check_source
from workers.sandbox.replies import FailureKind


@pytest.fixture
def fresh():
    """What was found out before does not count, nor will what the test finds."""
    probe.tried.cache_clear()
    probe.found.cache_clear()
    yield
    probe.tried.cache_clear()
    probe.found.cache_clear()


def test_one_works_on_this_machine(isolation):
    assert probe.isolation() == probe.Found(isolation, f"tenants' code runs under {isolation}")


def test_without_any_tenants_code_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv(probe.SETTING, "none")
    with SandboxPool(1, scratch_root=tmp_path) as pool:
        results = pool.grade(LENGTH, [CALL, CALL], 5.0)
    assert [(result.value, result.kind) for result in results] == [(None, FailureKind.SANDBOX)] * 2
    assert "tenants' code is refused: no isolation works on this machine" in results[0].error
    assert "apt-get install bubblewrap" in results[0].error
    with pytest.raises(ValueError, match="apt-get install bubblewrap"):
        check_source(LENGTH)


def test_what_is_missing_is_said(monkeypatch, fresh, caplog, tmp_path):
    """As on a machine without bubblewrap, where Landlock leaves not even the standard library in view."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(probe.SETTING, raising=False)
    monkeypatch.setattr(isolations, "files", lambda paths: {"read": [], "listed": [], "devices": []})
    found = probe.isolation()
    assert found.kind is None
    assert "bubblewrap: bubblewrap is not installed" in found.text
    assert "landlock: line 2, in <module>: ModuleNotFoundError: No module named 'socket'" in found.text
    assert found.text in caplog.text


def test_the_second_is_taken_where_the_first_does_not_work(monkeypatch, fresh, tmp_path):
    if problem := probe.tried(Isolation.LANDLOCK):
        pytest.skip(problem)
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(probe.SETTING, raising=False)
    found = probe.isolation()
    assert found.kind is Isolation.LANDLOCK
    assert "bwrap: No permissions to create new namespace" in found.text


def test_an_isolation_that_lets_something_through_is_none(monkeypatch, fresh):
    monkeypatch.setattr(
        probe, "ATTEMPTS", "def escapes(outside, parent): return ['opens sockets', 'reads files']\n"
    )
    for kind in Isolation:
        assert probe.tried(kind) in (
            "a process in it opens sockets and reads files",
            "bubblewrap is not installed",
        )


def test_a_setting_that_names_something_else_is_refused(monkeypatch):
    monkeypatch.setenv(probe.SETTING, "docker")
    with pytest.raises(
        ValueError, match="JIGSAW_SANDBOX names 'docker'; known are bubblewrap, landlock and none"
    ):
        SandboxPool(1)


def test_an_old_kernel_is_named(monkeypatch):
    monkeypatch.setattr(landlock, "version", lambda: 2)
    with pytest.raises(OSError, match=r"knows Landlock 2; version 3 is needed \(Linux 6.2\)"):
        landlock.rules([], [], [])
