"""What jobs are made of: base models, uploaded files, datasets, and the checkpoints that come out.

A row without an organization belongs to the service and is readable by every tenant.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from backend.common.ids import new_id
from backend.tenants.models import Organization, User


class BaseModel(models.Model):
    """Weights a job may start from: a folder in the Hugging Face layout."""

    organization = models.ForeignKey(
        Organization, on_delete=models.CASCADE, null=True, blank=True, related_name="base_models"
    )
    name = models.CharField(max_length=200)
    path = models.CharField(max_length=1000)
    architecture = models.CharField(max_length=64)
    parameters = models.BigIntegerField()
    context_length = models.PositiveIntegerField()
    bytes = models.BigIntegerField(help_text="size of the weights on disk")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["organization", "name"], name="base_model_name", nulls_distinct=False
            ),
        ]

    def __str__(self) -> str:
        return self.name


def file_id() -> str:
    return new_id("file")


class File(models.Model):
    """An uploaded file: rows to train on, or a corpus that tools search; checked row by row before it is
    accepted.
    """

    public_id = models.CharField(max_length=40, unique=True, default=file_id, editable=False)
    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="files")
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=32, default="fine-tune")
    path = models.CharField(max_length=1000)
    bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)
    rows = models.PositiveIntegerField()
    fields = models.JSONField(default=dict, help_text="field name -> rows that have it")
    kinds = models.JSONField(default=dict, help_text="prompt, completion, preference -> rows that are one")
    created_at = models.DateTimeField(auto_now_add=True)
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["organization", "-id"], name="file_by_org")]


class Dataset(models.Model):
    """A built-in dataset with its grader, its environment, and the settings that suit it."""

    name = models.CharField(max_length=100, unique=True)
    title = models.CharField(max_length=200)
    description = models.TextField()
    path = models.CharField(max_length=1000)
    rows = models.PositiveIntegerField()
    fields = models.JSONField(default=dict)
    kinds = models.JSONField(default=dict)
    grader = models.JSONField(null=True, help_text="empty: the environment gives rewards")
    environment = models.JSONField(null=True)
    recommended = models.JSONField(default=dict, help_text="overrides of the run's defaults")


class Corpus(models.Model):
    """Built-in passages for tools to search: JSONL of ``{"title", "text"}``."""

    name = models.CharField(max_length=100, unique=True)
    title = models.CharField(max_length=200)
    path = models.CharField(max_length=1000)
    passages = models.PositiveIntegerField()


def checkpoint_id() -> str:
    return new_id("ckpt")


class Checkpoint(models.Model):
    """A folder written by a run: an adapter in the PEFT format, or a full model."""

    class Format(models.TextChoices):
        PEFT = "peft", "LoRA adapter (PEFT)"
        FULL = "full", "Full model"

    public_id = models.CharField(max_length=40, unique=True, default=checkpoint_id, editable=False)
    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="checkpoints")
    base_model = models.ForeignKey(BaseModel, on_delete=models.PROTECT, related_name="checkpoints")
    format = models.CharField(max_length=8, choices=Format.choices)
    step = models.PositiveIntegerField(help_text="training steps completed")
    path = models.CharField(max_length=1000)
    bytes = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["path"], condition=Q(deleted_at__isnull=True), name="checkpoint_path_once"
            ),
        ]
