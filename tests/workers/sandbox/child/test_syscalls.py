"""The numbers of system calls, against libseccomp's."""

import ctypes

import pytest

from workers.sandbox.child.seccomp import checks
from workers.sandbox.child.syscalls import CHECKED, MACHINES, METADATA, PLAIN, numbers


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_the_kernels(machine):
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    resolve = library.seccomp_syscall_resolve_name_arch
    rows = [entry.split()[0] for table in (PLAIN, METADATA, CHECKED) for entry in table.split(",")]
    known = {name: resolve(MACHINES[machine][0], name.encode()) for name in rows}
    ours = {
        n: number for table in (PLAIN, METADATA, CHECKED) for n, number in numbers(table, machine).items()
    }
    assert ours == {name: number for name, number in known.items() if number >= 0}


def test_every_checked_call_has_its_checks_and_is_allowed_nowhere_else():
    checked = {entry.split()[0] for entry in CHECKED.split(",")}
    assert set(checks(1, 63)) == checked
    assert not checked & {entry.split()[0] for table in (PLAIN, METADATA) for entry in table.split(",")}


@pytest.mark.parametrize(
    "name", ["socket", "connect", "clone", "clone3", "fork", "vfork", "execve", "ptrace", "unshare"]
)
def test_what_leads_out_is_not_in_the_table(name):
    assert name not in {
        entry.split()[0] for table in (PLAIN, METADATA, CHECKED) for entry in table.split(",")
    }
