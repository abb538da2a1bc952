"""The ledger: append-only, in whole micro-dollars. Tenants + idle = capacity x time in service."""

from __future__ import annotations

from typing import Any, NoReturn

from django.db import models
from django.db.models import F, Q

from backend.jobs.models import Attempt, Job
from backend.pool.models import Device, SubStage
from backend.tenants.models import Organization


class AppendOnly(Exception):
    """Somebody tried to change what the ledger says. Correct it with a further row."""


class UsageRecord(models.Model):
    """What one sub-stage cost, what nobody used, or what we gave back.

    usage   a tenant's part of a device over an interval
    idle    the part nobody used, booked to the operator (no organization)
    credit  minus the usage it reverses: work lost by our fault; written together with
    waste   the same amount, booked to the operator

    ``fraction`` is what the exact price of a usage is above its whole micro-dollars, and minus that in its
    credit: a job's amounts and fractions add up to the exact price of the work it pays for.

    Rows are never changed and never deleted; a trigger of the database holds this for every writer.
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
    fraction = models.BigIntegerField(default=0, help_text="beside micro_usd, in division.MICRO_USD")
    reverses = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="reversals")
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
            models.CheckConstraint(
                condition=Q(entry__in=["usage", "idle"], reverses__isnull=True)
                | Q(entry__in=["credit", "waste"], reverses__isnull=False),
                name="usage_reversal",
            ),
            models.UniqueConstraint(fields=["reverses", "entry"], name="usage_reversed_once"),
        ]

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnly(f"usage record {self.pk} cannot be changed")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnly(f"usage record {self.pk} cannot be deleted")


class AttemptCredit(models.Model):
    """What the attempt did from this step on was lost by our fault, whenever it reaches the ledger."""

    attempt = models.OneToOneField(Attempt, on_delete=models.PROTECT, related_name="credit")
    since_step = models.PositiveIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)
