import os

import pytest

from workers.sandbox.isolation import Isolation
from workers.sandbox.pool import SandboxPool
from workers.sandbox.probe import SETTING, tried


@pytest.fixture(params=list(Isolation), scope="module")
def isolation(request):
    """Each that works on this machine."""
    if problem := tried(request.param):
        pytest.skip(f"{request.param}: {problem}")
    before = os.environ.get(SETTING)
    os.environ[SETTING] = request.param
    yield request.param
    os.environ.pop(SETTING)
    if before is not None:
        os.environ[SETTING] = before


@pytest.fixture(scope="module")
def pool(isolation, tmp_path_factory):
    with SandboxPool(2, scratch_root=tmp_path_factory.mktemp("scratch")) as pool:
        yield pool
