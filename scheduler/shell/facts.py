"""What a plan must know of jobs and attempts beyond their rows, worked out once and remembered.

A job's settings never change, and an attempt's profile only when a step is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backend.jobs import sizing
from backend.jobs.models import Attempt, Job
from backend.pool import selectors
from backend.pool.models import Device, Placement, Resident
from scheduler.core.interference import Interference, character
from scheduler.core.profile import Profile
from scheduler.core.state import OFF_DEVICE, Demand, Outlook
from scheduler.shell import priors, profiles
from scheduler.shell.calibrated import Calibrated, calibrated, type_name
from scheduler.shell.touch import Touch
from workers.chain import may_stream
from workers.models.config import read_config
from workers.spec import JobSpec, LoRA

#: Tokens of a prompt where the data cannot be looked at.
PROMPT_TOKENS = 80


@dataclass(frozen=True)
class Facts:
    """Of a job. ``kv_bytes`` are of a token, ``kv_tokens`` what its memory was sized for on a device."""

    spec: JobSpec
    base_model: str
    parameters: int
    prompt_tokens: int
    kv_tokens: int
    kv_bytes: int

    @property
    def fusible(self) -> bool:
        return isinstance(self.spec.rl.tuning, LoRA)

    def streams(self, policy_streams: bool) -> bool:
        return policy_streams and may_stream(self.spec)


@dataclass(frozen=True)
class Ground:
    """The type of device where a job's steps are expected to run."""

    type: str
    kind: str
    saturation: int
    table: Interference | None


#: Before the pool has a device.
NOWHERE = Ground("", "cpu", 1, None)


@dataclass(frozen=True)
class Pool:
    """What seldom changes: of each the rows."""

    devices: Sequence[Device]
    placements: Sequence[Placement]
    residents: Sequence[Resident]


@dataclass
class Lore:
    """``shared`` are the devices that were home to several attempts when they were last looked at.

    ``pool`` is as it was when the queue was last looked at; None once it was written to here. Who changes it
    from elsewhere rings the doorbell, after which all is looked at.
    """

    calibrated: Calibrated = field(default_factory=Calibrated)
    pool: Pool | None = None
    shared: frozenset[str] = frozenset()
    _facts: dict[int, Facts | None] = field(default_factory=dict)
    _outlooks: dict[tuple[object, ...], Outlook] = field(default_factory=dict)
    _profiles: dict[int, tuple[tuple[object, ...], bool, Profile]] = field(default_factory=dict)

    def refresh(self) -> None:
        """Look anew at the pool, and whether something new was measured."""
        self.pool = None
        found = calibrated(self.calibrated)
        if found is not self.calibrated:
            self.calibrated = found
            self._outlooks.clear()
            self._profiles.clear()

    def pool_now(self, anew: bool = False) -> Pool:
        if self.pool is None or anew:
            self.pool = Pool(
                list(selectors.devices()), list(selectors.open_placements()), list(selectors.residents())
            )
        return self.pool

    def ends(self, attempt: Attempt, device: str) -> Touch:
        """What to look at when something of the attempt is over there: nothing where it lives alone, since
        whatever follows is offered.
        """
        alone = self.shared.isdisjoint((device, *attempt.home))
        return Touch() if alone else Touch(devices={device})

    def forget(self, jobs: Iterable[int], attempts: Iterable[int]) -> None:
        """Keep only these."""
        jobs, attempts = set(jobs), set(attempts)
        self._facts = {pk: facts for pk, facts in self._facts.items() if pk in jobs}
        self._outlooks = {key: outlook for key, outlook in self._outlooks.items() if key[0] in jobs}
        self._profiles = {pk: found for pk, found in self._profiles.items() if pk in attempts}

    def learn(self, jobs: Iterable[int]) -> None:
        """Read the settings of jobs that were not seen before."""
        new = [pk for pk in jobs if pk not in self._facts]
        if new:
            found = Job.objects.filter(pk__in=new).select_related("base_model", "training_file", "dataset")
            self._facts |= {job.pk: _facts(job) for job in found}

    def of(self, job: int) -> Facts | None:
        """None where the job's stored settings are not understood."""
        return self._facts.get(job)

    def ground(self, device: Device) -> Ground:
        type = type_name(device)
        return Ground(type, device.kind, device.saturation_batch, self.calibrated.tables.get(type))

    def prior(self, job: int, ground: Ground, streams: bool) -> Outlook:
        facts = self._facts.get(job)
        if facts is None:
            return Outlook()
        key = (job, ground.type, ground.saturation, streams)
        if key not in self._outlooks:
            rates = self.calibrated.rates(ground.type, ground.kind, facts.base_model, facts.parameters)
            self._outlooks[key] = priors.prior(
                facts.spec, rates, ground.saturation, facts.prompt_tokens, streams
            )
        return self._outlooks[key]

    def profiles(self, attempts: Iterable[Attempt], grounds: dict[int, Ground]) -> None:
        """Read the profiles that are not known as they are now."""
        stale = []
        for attempt in attempts:
            known = self._profiles.get(attempt.pk)
            if known is None or known[0] != _stamp(attempt, grounds[attempt.pk]):
                stale.append(attempt)
        if not stale:
            return
        stored = dict(Attempt.objects.filter(pk__in=[a.pk for a in stale]).values_list("pk", "profile"))
        for attempt in stale:
            streams = bool(stored[attempt.pk].get("streams"))
            prior = self.prior(attempt.job_id, grounds[attempt.pk], streams)
            profile = profiles.load(stored[attempt.pk], prior)
            self._profiles[attempt.pk] = _stamp(attempt, grounds[attempt.pk]), streams, profile

    def profile_of(self, attempt: Attempt) -> tuple[bool, Profile] | None:
        """Whether it streams, and what its row says was seen; None for a job whose settings are not
        understood.
        """
        self.learn([attempt.job_id])
        if self._facts.get(attempt.job_id) is None:
            return None
        home = next((one for one in self.pool_now().devices if one.name in attempt.home[:1]), None)
        ground = self.ground(home) if home is not None else NOWHERE
        known = self._profiles.get(attempt.pk)
        if known is not None and known[0] == _stamp(attempt, ground):
            return known[1:]
        streams = bool(attempt.profile.get("streams"))
        return streams, profiles.load(attempt.profile, self.prior(attempt.job_id, ground, streams))

    def profile(self, attempt: int) -> tuple[bool, Profile]:
        """Whether it streams, and what was seen of it; after ``profiles``."""
        _, streams, profile = self._profiles[attempt]
        return streams, profile


def demand_of(outlook: Outlook, table: Interference | None, fusible: bool) -> Demand:
    """What a step alone takes of a device, in the mean, when each sub-stage has the share that it uses best.

    Jobs that fuse have the fixed part of a decode step in common; what their rows add, each has to itself.
    Without a table nothing is known of shares, and nothing is asked.
    """
    if table is None or outlook.seconds <= 0:
        return Demand()
    common = own = 0.0
    for segment in (*outlook.rollout, *outlook.train):
        if segment.kind in OFF_DEVICE:
            continue
        alone = table.alone[character(segment.kind, segment.batch)]
        cost = segment.seconds * min(share * slow for share, slow in zip(table.shares, alone, strict=True))
        part = segment.floor_seconds / segment.forward_seconds if fusible and segment.forward_seconds else 0.0
        common += cost * part
        own += cost * (1 - part)
    return Demand(rollout=common / outlook.seconds, train=own / outlook.seconds)


def _stamp(attempt: Attempt, ground: Ground) -> tuple[object, ...]:
    return attempt.step_began_at, ground.type, ground.saturation


def _facts(job: Job) -> Facts | None:
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValueError:
        return None
    prompt = _prompt_tokens(job)
    kv_tokens, kv_bytes = _cache(job, spec, prompt)
    return Facts(spec, job.base_model.name, job.base_model.parameters, prompt, kv_tokens, kv_bytes)


def _prompt_tokens(job: Job) -> int:
    source = job.training_file or job.dataset
    try:
        return sizing.guessed_prompt_tokens(Path(source.path).stat().st_size, max(1, source.rows))
    except OSError:
        return PROMPT_TOKENS


def _cache(job: Job, spec: JobSpec, prompt_tokens: int) -> tuple[int, int]:
    """(0, 0), which bounds nothing, where nothing is rolled out or the model cannot be looked at."""
    if not spec.rl.method.rolls_out:
        return 0, 0
    try:
        config = read_config(Path(job.base_model.path))
    except ValueError:
        return 0, 0
    tokens = min(config.context, prompt_tokens + spec.rl.sampling.max_tokens)
    value = sizing.BYTES_PER_VALUE[spec.rl.precision]
    return sizing.sequences_per_device(spec.rl) * tokens, sizing.kv_bytes_per_token(config, value)
