"""The sentences of refusals, as a tenant reads them."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sizes(need: int, have: int) -> tuple[str, str]:
    """Both in the unit of the larger, with as many digits as it takes to tell them apart."""
    unit, name = next(
        (unit, name)
        for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
        if max(need, have) >= unit or unit == 1
    )
    for digits in range(10):
        texts = [f"{value / unit:.{digits}f} {name}" for value in (need, have)]
        exact = all(round(value / unit, digits) * unit == value for value in (need, have))
        if exact or (digits > 0 and texts[0] != texts[1]):
            break
    return texts[0], texts[1]


def too_many_devices(need: int, pool: int) -> str:
    return f"needs {count(need, 'device')}, the pool has {pool}"


def too_little_memory(devices: int, need: int, largest: int, large_enough: int) -> str:
    need_text, largest_text = sizes(need, largest)
    if large_enough == 0:
        return f"needs {need_text}, the largest device has {largest_text}"
    return f"needs {count(devices, 'device')} with {need_text}, the pool has {large_enough}"


def not_ready(devices: int, ready: int) -> str:
    if ready == 0:
        return "no device is ready"
    are = "is" if ready == 1 else "are"
    return f"needs {count(devices, 'device')}, only {ready} that can hold it {are} ready"


def no_new_home(need: int, found: int) -> str:
    with_memory = "none that is ready has" if found == 0 else f"only {found} that are ready have"
    return f"needs {count(need, 'other device')} for its next step, {with_memory} memory for it"


def over_quota(devices: int, limit: int, used: int, ahead: int) -> str:
    if devices > limit:
        return f"needs {count(devices, 'device')}, your organization's limit is {limit}"
    if ahead:
        return f"your organization's limit of {count(limit, 'device')} is taken: {ahead} of its jobs ahead"
    if used >= limit:
        return f"your organization's limit of {count(limit, 'device')} is in use"
    return f"needs {count(devices, 'device')}, your organization's limit of {limit} leaves {limit - used}"


def waiting(for_what: str, ahead: int) -> str:
    return f"waiting for {for_what}: " + (f"{count(ahead, 'job')} ahead" if ahead else "next in line")
