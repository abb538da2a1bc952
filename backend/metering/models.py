"""The ledger: append-only, in whole micro-dollars. Tenants + idle = capacity x time, on every device."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from backend.jobs.models import Job
from backend.pool.models import Device, SubStage
from backend.tenants.models import Organization


class UsageRecord(models.Model):
    """What one sub-stage cost, what nobody used, or what we gave back.

    usage   a tenant's part of a device over an interval
    idle    the part nobody used, booked to the operator (no organization)
    credit  minus a usage: work lost by our fault; written together with
    waste   the same amount, booked to the operator
    """

    class Entry(models.TextChoices):
        USAGE = "usage"
        IDLE = "idle"
        CREDIT = "credit"
        WASTE = "waste"

    entry = models.CharField(max_length=8, choices=Entry.choices)
    device = models.ForeignKey(Device, on_delete=models.PROTECT, related_name="usage")
    organization = models.ForeignKey(Organization, on_delete=models.PROTECT, null=True, related_name="usage")
    job = models.ForeignKey(Job, on_delete=models.PROTECT, null=True, related_name="usage")
    substage = models.ForeignKey(SubStage, on_delete=models.PROTECT, null=True, related_name="usage")
    kind = models.CharField(max_length=8, blank=True)
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    device_microseconds = models.BigIntegerField(help_text="interval x share")
    micro_usd = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [
            models.Index(fields=["organization", "started_at"], name="usage_by_org"),
            models.Index(fields=["job", "id"], name="usage_by_job"),
            models.Index(fields=["device", "started_at"], name="usage_by_device"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(entry__in=["usage", "credit"], organization__isnull=False)
                | Q(entry__in=["idle", "waste"], organization__isnull=True),
                name="usage_owner",
            ),
            models.CheckConstraint(condition=Q(ended_at__gte=F("started_at")), name="usage_interval"),
            models.UniqueConstraint(
                fields=["substage"], condition=Q(entry="credit"), name="usage_one_credit_per_substage"
            ),
        ]
