"""Jobs, their attempts, and everything a job says while it runs.

``Event`` is the job's one stream: status changes, messages, metrics, checkpoints, sub-stages. Its ``seq`` is
assigned under the job's row lock, so that whoever has read up to n misses nothing that commits later.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from backend.catalog.models import BaseModel, Checkpoint, Dataset, File
from backend.common.ids import new_id
from backend.jobs.states import ATTEMPT_TERMINAL, AttemptStatus, JobStatus, Reason
from backend.tenants.models import ApiKey, Organization, User


def job_id() -> str:
    return new_id("ftjob")


def choices(enum: type) -> list[tuple[str, str]]:
    return [(member.value, member.value) for member in enum]


class Job(models.Model):
    public_id = models.CharField(max_length=40, unique=True, default=job_id, editable=False)
    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="jobs")
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    created_by_key = models.ForeignKey(ApiKey, on_delete=models.SET_NULL, null=True, related_name="+")
    name = models.CharField(max_length=100, blank=True)
    idempotency_key = models.CharField(max_length=255, null=True, blank=True)
    request_digest = models.CharField(max_length=64, blank=True)

    base_model = models.ForeignKey(BaseModel, on_delete=models.PROTECT, related_name="jobs")
    training_file = models.ForeignKey(File, on_delete=models.PROTECT, null=True, related_name="jobs")
    dataset = models.ForeignKey(Dataset, on_delete=models.PROTECT, null=True, related_name="jobs")
    start = models.ForeignKey(
        Checkpoint,
        on_delete=models.PROTECT,
        null=True,
        related_name="started",
        help_text="whose weights the job begins with, and compares with; empty: the model's",
    )
    searches = models.ManyToManyField(
        File, related_name="searched_by", help_text="uploaded corpora that the job's tools read"
    )
    spec = models.JSONField(help_text="the resolved job spec: enough to run the job again")
    metadata = models.JSONField(default=dict)
    priority = models.SmallIntegerField(default=0)
    devices = models.PositiveIntegerField(default=1)
    weights_key = models.CharField(max_length=200)
    weights_bytes = models.BigIntegerField(help_text="memory of the base weights on a device")
    run_bytes = models.BigIntegerField(help_text="memory of the run itself: adapter, optimizer, caches")

    status = models.CharField(max_length=20, choices=choices(JobStatus), default=JobStatus.VALIDATING)
    reason = models.CharField(max_length=32, choices=choices(Reason), default=Reason.SUBMITTED)
    detail = models.TextField(blank=True, help_text="the reason's particular, as the customer reads it")
    error_param = models.CharField(max_length=200, blank=True)
    wait_code = models.CharField(max_length=32, blank=True)
    wait_text = models.CharField(max_length=300, blank=True, help_text="why nothing runs now")
    ahead = models.PositiveIntegerField(default=0, help_text="jobs before this one in the queue")

    steps = models.PositiveIntegerField()
    steps_done = models.PositiveIntegerField(default=0)
    tokens = models.BigIntegerField(default=0, help_text="tokens sampled in completed steps")
    cost_micro_usd = models.BigIntegerField(default=0, help_text="sum of the job's usage records")
    cost_fraction = models.BigIntegerField(default=0, help_text="their fractions, for the next one to fill")
    last_reward = models.FloatField(null=True, blank=True)
    event_seq = models.BigIntegerField(default=0)

    checks = models.PositiveSmallIntegerField(default=0, help_text="checks of the data that were begun")

    created_at = models.DateTimeField(auto_now_add=True)
    queued_at = models.DateTimeField(null=True, blank=True)
    retry_at = models.DateTimeField(null=True, blank=True, help_text="no attempt starts before")
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["organization", "-id"], name="job_by_org"),
            models.Index(
                fields=["status", "id"],
                name="job_live",
                condition=Q(status__in=[JobStatus.VALIDATING, JobStatus.QUEUED, JobStatus.RUNNING]),
            ),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["organization", "idempotency_key"],
                condition=Q(idempotency_key__isnull=False),
                name="job_idempotency_key",
            ),
            models.CheckConstraint(
                condition=Q(training_file__isnull=False, dataset__isnull=True)
                | Q(training_file__isnull=True, dataset__isnull=False),
                name="job_has_one_source_of_data",
            ),
        ]


class Attempt(models.Model):
    """One run of a job from a checkpoint (or from the start). ``report_seq`` fences repeated reports."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    status = models.CharField(max_length=16, choices=choices(AttemptStatus), default=AttemptStatus.STARTING)
    reason = models.CharField(max_length=32, choices=choices(Reason), default=Reason.ADMITTED)
    detail = models.TextField(blank=True)
    resume_from = models.ForeignKey(Checkpoint, on_delete=models.PROTECT, null=True, related_name="+")
    start_step = models.PositiveIntegerField(default=0)
    home = models.JSONField(help_text="device name per worker: where its weights and optimizer live")
    step_seconds = models.FloatField(default=10.0, help_text="how long its last step held its devices")
    step_began_at = models.DateTimeField(null=True, help_text="since when its present step runs")
    wait_until = models.DateTimeField(null=True, help_text="it is held back on purpose until then")
    profile = models.JSONField(
        default=dict, help_text="what was seen of its steps (scheduler.shell.profiles)"
    )
    report_seq = models.PositiveBigIntegerField(default=0, help_text="last report applied")
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "number"], name="attempt_number"),
            models.UniqueConstraint(
                fields=["job"],
                condition=~Q(status__in=[s.value for s in sorted(ATTEMPT_TERMINAL)]),
                name="attempt_one_live_per_job",
            ),
        ]


class Transition(models.Model):
    """A status change: written in the transaction that makes it."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="transitions")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, null=True, related_name="transitions")
    old = models.CharField(max_length=20)
    new = models.CharField(max_length=20)
    reason = models.CharField(max_length=32, choices=choices(Reason))
    detail = models.TextField(blank=True)
    actor = models.CharField(max_length=100, help_text="user:…, key:…, scheduler, validator")
    stimulus = models.CharField(max_length=100, blank=True, help_text="what set it off: a request, a report")
    at = models.DateTimeField(auto_now_add=True)


class Event(models.Model):
    class Type(models.TextChoices):
        MESSAGE = "message"
        METRICS = "metrics"
        STATUS = "status"
        CHECKPOINT = "checkpoint"
        SUBSTAGE = "substage"
        COST = "cost"

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="events")
    seq = models.BigIntegerField()
    type = models.CharField(max_length=12, choices=Type.choices)
    level = models.CharField(max_length=8, default="info")
    message = models.TextField(blank=True)
    data = models.JSONField(default=dict)
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "seq"], name="event_seq")]


class StepMetrics(models.Model):
    """The numbers of one trained step (names: ``workers.protocol.METRICS``)."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="step_metrics")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="+")
    step = models.PositiveIntegerField()
    values = models.JSONField()
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "step"], name="step_metrics_once")]


class Sample(models.Model):
    """A completion kept for people to read."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="samples")
    step = models.PositiveIntegerField()
    group = models.PositiveIntegerField()
    index = models.PositiveIntegerField()
    row = models.PositiveIntegerField(help_text="0-based row of the data")
    prompt = models.TextField()
    completion = models.TextField()
    tokens = models.PositiveIntegerField()
    reward = models.FloatField(null=True)
    error = models.TextField(blank=True)
    advantage = models.FloatField()
    parts = models.JSONField(default=dict, help_text="what the reward is made of, by name")
    finish = models.CharField(max_length=8)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "step", "group", "index"], name="sample_once"),
        ]


class JobCheckpoint(models.Model):
    """Which attempt of which job wrote a checkpoint."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="job_checkpoints")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="+")
    checkpoint = models.OneToOneField(Checkpoint, on_delete=models.CASCADE, related_name="produced_by")
    final = models.BooleanField(default=False)
