"""How the price of a device is divided among those on it. Whole microseconds and whole micro-dollars only.

A device that costs ``p`` micro-dollars an hour has cost ``C(t) = floor(p * (t - in service) / hour)`` by the
instant ``t``, so the prices of successive intervals add up to the price of the whole, without a rest. A
device that was away begins anew: each time in service has its own ``C`` and is divided by itself.

An occupant with share ``s`` costs its payer ``p * s * d / hour`` over ``d``, and what of that is below a
micro-dollar is carried to the payer's next piece, on whatever device. Where its share changes, it is an
occupant several times with the same key, and still has one part. So all pieces of a payer together cost

    floor(sum of p_i * s_i * d_i / hour)

and nothing of a neighbour is in that, and nothing of when the meters were read: packing others in, or reading
more often, changes no bill by a single micro-dollar. Whatever is left of the device's price, roundings
included, is idle time and the operator's. As shares add up to 1 at most, roundings are in the operator's
disfavour: for payers who were on one device only, the sum of their floors is at most the floor of its price.

A payer's rest may fill up to a micro-dollar in any reading, on any of its devices; then the idle part of that
reading can be a micro-dollar for each payer below nothing, and repays what earlier readings kept. The sum
over all devices stays above minus one micro-dollar for each time in service and each credit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from backend.pool.parts import WHOLE

HOUR_US = 3_600_000_000
#: A micro-dollar, in the parts in which every price is whole: micro-dollars an hour x ppm x microseconds.
MICRO_USD = WHOLE * HOUR_US

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Occupant:
    """Who was on the device from ``start_us`` to ``end_us`` with ``share_ppm`` of it, and who pays for it.

    Those with the same key are one, with shares that change; they do not overlap.
    """

    key: int
    start_us: int
    end_us: int
    share_ppm: int
    payer: int

    def __post_init__(self) -> None:
        if self.end_us < self.start_us:
            raise ValueError(f"occupant {self.key}: ends at {self.end_us}, before its start {self.start_us}")
        if not 0 < self.share_ppm <= WHOLE:
            raise ValueError(f"occupant {self.key}: share {self.share_ppm} ppm is not in (0, {WHOLE}]")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the device's time and price; of an occupant, or idle (``key`` is None).

    ``fraction`` is what an occupant's exact price is above ``micro_usd``, in parts of ``MICRO_USD``; below
    nothing where a rest that was carried here made the micro-dollar full.
    """

    key: int | None
    start_us: int
    end_us: int
    device_microseconds: int
    micro_usd: int
    fraction: int = 0


def clip(occupants: Iterable[Occupant], start_us: int, end_us: int) -> list[Occupant]:
    """The occupants as far as they were on the device in [start, end), a time in which it was in service."""
    return [
        replace(o, start_us=max(o.start_us, start_us), end_us=min(o.end_us, end_us))
        for o in occupants
        if o.start_us < end_us and start_us < o.end_us
    ]


def device_price(price: int, us: int) -> int:
    """Micro-dollars a device has cost after ``us`` in service, at ``price`` micro-dollars an hour."""
    return price * us // HOUR_US


def occupant_price(price: int, share_ppm: int, us: int) -> int:
    """The exact price of ``us`` on a device with a share of it, in parts of ``MICRO_USD``."""
    return price * share_ppm * us


def divide(
    price: int,
    in_service_us: int,
    start_us: int,
    end_us: int,
    occupants: Iterable[Occupant],
    carried: MutableMapping[int, int],
) -> list[Part]:
    """Divide the device's price over [start, end). The parts add up to C(end) - C(start), exactly.

    The window is cut at the instants at which no occupant is cut, and each stretch adds up to its own price.
    Occupants reach beyond the window if they did so in fact: whole microseconds of theirs count from their
    own start. ``carried`` is each payer's rest so far, in parts of ``MICRO_USD``, and is brought up to date;
    who is not in it comes with none. Raises ValueError when more than the whole device was occupied.
    """
    if not in_service_us <= start_us <= end_us:
        raise ValueError(f"not in order: in service {in_service_us}, start {start_us}, end {end_us}")
    present = sorted(
        (o for o in occupants if max(o.start_us, start_us) < min(o.end_us, end_us)),
        key=lambda o: (o.start_us, o.key),
    )
    if peak_ppm(present) > WHOLE:
        raise ValueError(f"shares add up to {peak_ppm(present)} ppm of a device of {WHOLE}")
    parts: list[Part] = []
    for lo, hi, group in _stretches(present, start_us, end_us):
        used: list[Part] = []
        for o in group:
            rest = carried.get(o.payer, 0)
            part = _occupant_part(price, o, max(o.start_us, lo), min(o.end_us, hi), rest)
            carried[o.payer] = rest + part.fraction
            used.append(part)
        idle = Part(
            key=None,
            start_us=lo,
            end_us=hi,
            device_microseconds=hi - lo - sum(part.device_microseconds for part in used),
            micro_usd=device_price(price, hi - in_service_us)
            - device_price(price, lo - in_service_us)
            - sum(part.micro_usd for part in used),
        )
        parts += joined(used)
        if idle.device_microseconds or idle.micro_usd:
            parts.append(idle)
    return parts


def _occupant_part(price: int, occupant: Occupant, lo: int, hi: int, rest: int) -> Part:
    before, after = lo - occupant.start_us, hi - occupant.start_us
    share = occupant.share_ppm
    exact = occupant_price(price, share, hi - lo)
    # A credit can leave a rest below nothing: it is worked off, and not paid out.
    micro_usd = max(0, (rest + exact) // MICRO_USD)
    return Part(
        key=occupant.key,
        start_us=lo,
        end_us=hi,
        device_microseconds=share * after // WHOLE - share * before // WHOLE,
        micro_usd=micro_usd,
        fraction=exact - micro_usd * MICRO_USD,
    )


def joined(parts: Iterable[Part]) -> list[Part]:
    """One part for what an occupant had without a pause, whatever its share was; in order of time."""
    found: list[Part] = []
    newest: dict[int | None, int] = {}
    for part in parts:
        at = newest.get(part.key)
        if at is None or found[at].end_us != part.start_us:
            newest[part.key] = len(found)
            found.append(part)
            continue
        before = found[at]
        found[at] = replace(
            before,
            end_us=part.end_us,
            device_microseconds=before.device_microseconds + part.device_microseconds,
            micro_usd=before.micro_usd + part.micro_usd,
            fraction=before.fraction + part.fraction,
        )
    return found


def _stretches(
    present: Sequence[Occupant], start_us: int, end_us: int
) -> Iterator[tuple[int, int, list[Occupant]]]:
    """Cut [start, end) wherever nobody is cut: gaps, and groups whose intervals hang together.

    ``present`` is sorted by start.
    """
    at = start_us
    group: list[Occupant] = []
    group_end = start_us
    for occupant in present:
        begins = max(occupant.start_us, start_us)
        if begins >= group_end and not any(_goes_on(before, occupant) for before in group):
            if group:
                yield at, group_end, group
                at = group_end
            if at < begins:
                yield at, begins, []
                at = begins
            group = []
        group.append(occupant)
        group_end = max(group_end, min(occupant.end_us, end_us))
    if group:
        yield at, group_end, group
        at = group_end
    if at < end_us:
        yield at, end_us, []


def _goes_on(before: Occupant, after: Occupant) -> bool:
    return before.key == after.key and before.end_us == after.start_us


def peak_ppm(occupants: Iterable[Occupant]) -> int:
    """The largest sum of shares at any instant."""
    changes = [
        change
        for o in occupants
        if o.start_us < o.end_us
        for change in ((o.start_us, o.share_ppm), (o.end_us, -o.share_ppm))
    ]
    level = peak = 0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak


def fitting(occupants: Iterable[Occupant]) -> tuple[list[Occupant], list[Occupant]]:
    """Those who fit on the device, first come first served, and those who would make it more than whole."""
    occupants = list(occupants)
    if peak_ppm(occupants) <= WHOLE:
        return occupants, []
    kept: list[Occupant] = []
    over: list[Occupant] = []
    for occupant in occupants:
        (kept if peak_ppm([*kept, occupant]) <= WHOLE else over).append(occupant)
    return kept, over


def to_us(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def from_us(us: int) -> datetime:
    return _EPOCH + us * _MICROSECOND
