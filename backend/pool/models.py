"""The pool: nodes, devices, what is loaded on them, who holds them, and every sub-stage that ran."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from backend.jobs.models import Attempt, Job, choices
from backend.pool.states import DeviceState, SubStageStatus
from workers.protocol import SubStageKind


class Node(models.Model):
    """A machine of the Ray cluster."""

    name = models.CharField(max_length=200, unique=True)
    ray_node_id = models.CharField(max_length=64, blank=True)
    address = models.CharField(max_length=64, blank=True)
    alive = models.BooleanField(default=False)
    seen_at = models.DateTimeField(null=True, blank=True)


class Device(models.Model):
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="devices")
    name = models.CharField(max_length=200, unique=True)
    index = models.PositiveIntegerField(help_text="number of the device on its node")
    kind = models.CharField(max_length=8, choices=[("cpu", "CPU"), ("gpu", "GPU")])
    type = models.CharField(max_length=64, help_text="model name, for profiles and prices")
    threads = models.PositiveIntegerField()
    memory_bytes = models.BigIntegerField()
    saturation_batch = models.PositiveIntegerField()
    price_micro_usd_hour = models.BigIntegerField()
    state = models.CharField(max_length=12, choices=choices(DeviceState), default=DeviceState.READY)
    draining = models.BooleanField(default=False, help_text="an operator takes it out: no new work begins")
    lost_at = models.DateTimeField(null=True, help_text="since when it is lost; null: it is not")
    metered_until = models.DateTimeField(help_text="every micro-dollar before this instant is in the ledger")
    changed_at = models.DateTimeField(
        null=True, help_text="last lock for a change of what computes here: nothing begins before"
    )

    def __str__(self) -> str:
        return self.name


class ServiceInterval(models.Model):
    """A time in which the device was there to be used: capacity is metered over these, and nothing between.

    The last one is open. It is closed when the device comes back from a loss or a restart, at the last
    instant for which there is evidence that it was in service; a new one begins then.
    """

    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="service_intervals")
    start = models.DateTimeField()
    end = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["device"], condition=Q(end__isnull=True), name="service_one_open_per_device"
            ),
            models.CheckConstraint(
                condition=Q(end__isnull=True) | Q(end__gte=F("start")), name="service_ends_after_start"
            ),
        ]


class Resident(models.Model):
    """Weights loaded on a device: a rollout engine and a trainer over the same base."""

    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="residents")
    weights_key = models.CharField(max_length=200)
    bytes = models.BigIntegerField()
    last_used_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["device", "weights_key"], name="resident_once"),
        ]


class Placement(models.Model):
    """A worker's hold on a device, for one step. The device serves nobody else meanwhile."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="placements")
    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="placements")
    worker = models.PositiveIntegerField()
    reason = models.CharField(max_length=300, blank=True)
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["device"], condition=Q(closed_at__isnull=True), name="placement_one_open_per_device"
            ),
            models.UniqueConstraint(
                fields=["attempt", "worker"],
                condition=Q(closed_at__isnull=True),
                name="placement_one_open_per_worker",
            ),
        ]


class SubStage(models.Model):
    """One sub-stage: offered by a pipeline, granted a share of a device, executed, metered."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="substages")
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="substages")
    node = models.CharField(max_length=64, help_text="unique within the attempt")
    step = models.PositiveIntegerField()
    worker = models.PositiveIntegerField()
    kind = models.CharField(max_length=8, choices=choices(SubStageKind))
    sequences = models.PositiveIntegerField()
    part = models.PositiveSmallIntegerField(default=0, help_text="place in its chain (workers.chain)")
    gang = models.CharField(max_length=64, blank=True, help_text="those that start together")
    early = models.BooleanField(default=False, help_text="trains while others of its step roll out")
    yielded = models.BooleanField(default=False, help_text="what is left of one that made room")
    left = models.FloatField(default=1.0, help_text="part of the sub-stage that remained when it was offered")
    cached_tokens = models.PositiveIntegerField(default=0)
    moves_to = models.CharField(max_length=64, blank=True, help_text="node its sequences were merged into")
    slot = models.CharField(max_length=220, blank=True, help_text="the resident that runs it: who fuses")
    reason = models.CharField(max_length=300, blank=True, help_text="why it runs where it does")
    status = models.CharField(max_length=8, choices=choices(SubStageStatus), default=SubStageStatus.READY)
    action_id = models.CharField(max_length=100, null=True, unique=True)
    device = models.ForeignKey(Device, on_delete=models.CASCADE, null=True, related_name="substages")
    share = models.FloatField(null=True)
    tokens = models.BigIntegerField(default=0)
    forwards = models.PositiveIntegerField(default=0)
    offered_at = models.DateTimeField()
    granted_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    metered = models.BooleanField(default=False, help_text="its usage is in the ledger")

    class Meta:
        indexes = [
            models.Index(fields=["device", "started_at"], name="substage_by_device"),
            models.Index(fields=["job", "started_at"], name="substage_by_job"),
            models.Index(
                fields=["attempt"],
                name="substage_open",
                condition=Q(
                    status__in=[SubStageStatus.READY, SubStageStatus.GRANTED, SubStageStatus.LEAVING]
                ),
            ),
            models.Index(
                fields=["device"],
                name="substage_unmetered",
                condition=Q(metered=False, device__isnull=False),
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["attempt", "node"], name="substage_node_once"),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True) | Q(ended_at__gte=F("started_at")),
                name="substage_ends_after_start",
            ),
            models.CheckConstraint(
                condition=Q(share__isnull=True) | Q(share__gt=0, share__lte=1), name="substage_share"
            ),
        ]


class Allotment(models.Model):
    """What a sub-stage has of its device for a while: changes of shares and of company begin a new one.

    ``part_ppm`` is what is billed: the share, divided by rows among those who decode in one batch. ``speed``
    is the solo seconds it is expected to do in a second.
    """

    substage = models.ForeignKey(SubStage, on_delete=models.CASCADE, related_name="allotments")
    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="allotments")
    start = models.DateTimeField()
    end = models.DateTimeField(null=True)
    share = models.FloatField()
    part_ppm = models.PositiveIntegerField()
    speed = models.FloatField(default=1.0)
    reason = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["substage"], condition=Q(end__isnull=True), name="allotment_one_open"
            ),
            models.CheckConstraint(
                condition=Q(end__isnull=True) | Q(end__gte=F("start")), name="allotment_ends_after_start"
            ),
            models.CheckConstraint(condition=Q(share__gt=0, share__lte=1), name="allotment_share"),
        ]
        indexes = [
            models.Index(fields=["device"], name="allotment_open", condition=Q(end__isnull=True)),
            models.Index(fields=["device", "start"], name="allotment_by_start"),
            models.Index(fields=["device", "end"], name="allotment_by_end"),
        ]


class DeviceCalibration(models.Model):
    """What was measured on a type of device with a base model (``workers.protocol.Calibration``)."""

    device_type = models.CharField(max_length=64)
    threads = models.PositiveIntegerField()
    base_model = models.CharField(max_length=200)
    values = models.JSONField()
    measured_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["device_type", "threads", "base_model"], name="calibration_once"),
        ]


class Decision(models.Model):
    """One action the scheduler committed, with the reason a person can read."""

    at = models.DateTimeField()
    stimulus = models.CharField(max_length=100, blank=True)
    kind = models.CharField(max_length=16)
    job = models.ForeignKey(Job, on_delete=models.CASCADE, null=True, related_name="decisions")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, null=True, related_name="+")
    device = models.ForeignKey(Device, on_delete=models.CASCADE, null=True, related_name="+")
    reason = models.CharField(max_length=300)

    class Meta:
        indexes = [
            models.Index(fields=["job", "id"], name="decision_by_job"),
            models.Index(fields=["device", "at"], name="decision_by_device"),
            models.Index(fields=["at"], name="decision_by_time"),
        ]
