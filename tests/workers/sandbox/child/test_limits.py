"""Which folders another user than root can read."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from workers.sandbox.child.limits import reachable


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give root up")
def test_who_can_read_a_folder():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    (folder / "home" / "lib").mkdir(parents=True)
    for path in (folder, folder / "home", folder / "home" / "lib"):
        path.chmod(0o755)
    assert reachable(str(folder / "home" / "lib")) == str(folder / "home" / "lib")
    (folder / "home").chmod(0o700)
    assert reachable(str(folder / "home" / "lib")).startswith("/proc/self/fd/")
    (folder / "home" / "lib").chmod(0o700)
    with pytest.raises(OSError, match="cannot be read by another user than root"):
        reachable(str(folder / "home" / "lib"))
    shutil.rmtree(folder)
