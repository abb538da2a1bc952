"""Small makers of rows for every test: two tenants and a stranger, models, data, jobs.

Each call makes something new, so tests need not clean up or agree on names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from django.utils import timezone

from backend.catalog.models import BaseModel, Checkpoint, Dataset, File
from backend.jobs.models import Attempt, Job, JobCheckpoint
from backend.jobs.states import AttemptStatus, JobStatus, Reason
from backend.tenants.access import Actor
from backend.tenants.models import ApiKey, Membership, Organization, Role, User
from backend.tenants.services import api_key_issue
from workers.data.shapes import check_row
from workers.spec import JobSpec, RLConfig

PASSWORD = "correct horse battery staple"
_numbers = count(1)

#: The config of a Llama small enough for any test; nothing but its numbers is needed to size a job.
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GRADER = {"type": "string_check", "name": "exact", "reference": "{{item.answer}}", "operation": "eq"}


def user(email: str | None = None, password: str | None = None, **fields: Any) -> User:
    """A person; give ``PASSWORD`` where one must sign in with it, for hashing one takes a while."""
    return User.objects.create_user(email or f"user{next(_numbers)}@example.com", password, **fields)


def organization(name: str | None = None, **fields: Any) -> Organization:
    name = name or f"Organization {next(_numbers)}"
    return Organization.objects.create(name=name, slug=name.lower().replace(" ", "-"), **fields)


def member(of: Organization, role: Role = Role.MEMBER) -> User:
    person = user()
    Membership.objects.create(organization=of, user=person, role=role)
    return person


def api_key(of: Organization, role: Role = Role.MEMBER) -> tuple[ApiKey, str]:
    """The key and its secret."""
    return api_key_issue(organization=of, name=f"key {next(_numbers)}", role=role)


def actor(of: Organization, role: Role = Role.MEMBER) -> Actor:
    """A person of that role in the organization."""
    return Actor(organization=of, role=role, user=member(of, role))


def model_folder(folder: Path, **config: Any) -> Path:
    """A folder with a config, a tokenizer of single characters and a chat template, and no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    letters = ["<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({text: n for n, text in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    numbers = {**TINY_CONFIG, "vocab_size": len(letters), "eos_token_id": 0, **config}
    (folder / "config.json").write_text(json.dumps(numbers))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = {"chat_template": template, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def base_model(
    folder: Path, name: str | None = None, of: Organization | None = None, **config: Any
) -> BaseModel:
    """A registered model; ``folder`` is filled if it is not there."""
    if not (folder / "config.json").exists():
        model_folder(folder, **config)
    numbers = json.loads((folder / "config.json").read_text())
    return BaseModel.objects.create(
        organization=of,
        name=name or f"tiny-{next(_numbers)}",
        path=str(folder),
        architecture=numbers["architectures"][0],
        parameters=20_000,
        context_length=numbers["max_position_embeddings"],
        bytes=40_000,
    )


def row(content: str = "2 + 2 = ?", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return path


def rows_with_answers(number: int = 8) -> list[dict[str, Any]]:
    return [row(f"{n} + 1 = ?", answer=str(n + 1)) for n in range(number)]


def file(of: Organization, folder: Path, rows: list[dict[str, Any]] | None = None) -> File:
    """An uploaded file of that organization, its bytes below ``folder``."""
    rows = rows_with_answers() if rows is None else rows
    path = write_rows(folder / f"file-{next(_numbers)}.jsonl", rows)
    fields: dict[str, int] = {}
    for entry in rows:
        for name in entry:
            fields[name] = fields.get(name, 0) + 1
    return File.objects.create(
        organization=of,
        filename=path.name,
        path=str(path),
        bytes=path.stat().st_size,
        sha256="0" * 64,
        rows=len(rows),
        fields=fields,
        kinds=Counter(kind for number, entry in enumerate(rows, 1) for kind in check_row(entry, number)),
    )


def dataset(folder: Path, name: str | None = None, **fields: Any) -> Dataset:
    name = name or f"sums-{next(_numbers)}"
    path = write_rows(folder / f"{name}.jsonl", rows_with_answers())
    content = {
        "title": "Sums",
        "description": "Add one.",
        "rows": 8,
        "fields": {"messages": 8, "answer": 8},
        "grader": GRADER,
        "recommended": {},
    }
    return Dataset.objects.create(name=name, path=str(path), **{**content, **fields})


def spec(model: str, training_file: str, **rl: Any) -> JobSpec:
    content = {"model": model, "training_file": training_file, "grader": GRADER, "rl": rl}
    if not RLConfig.model_validate(rl).method.rolls_out:
        content["grader"] = None
    return JobSpec.model_validate(content)


def job(
    of: Organization,
    folder: Path,
    *,
    status: JobStatus = JobStatus.QUEUED,
    model: BaseModel | None = None,
    training_file: File | None = None,
    rl: dict[str, Any] | None = None,
    **fields: Any,
) -> Job:
    """A job in any status, as its services would have left it. Model and file are made below ``folder``."""
    model = model or base_model(folder / f"model-{next(_numbers)}")
    training_file = training_file or file(of, folder)
    wanted = spec(model.name, training_file.public_id, **(rl or {}))
    now = timezone.now()
    content = {
        "base_model": model,
        "training_file": training_file,
        "spec": wanted.model_dump(mode="json"),
        "devices": wanted.rl.devices,
        "steps": wanted.rl.steps,
        "weights_key": model.name,
        "weights_bytes": 80_000,
        "run_bytes": 1_000_000,
        "status": status,
        "queued_at": None if status == JobStatus.VALIDATING else now,
    }
    return Job.objects.create(organization=of, **{**content, **fields})


def attempt(of: Job, status: AttemptStatus = AttemptStatus.RUNNING, **fields: Any) -> Attempt:
    """The job's next attempt. The job's own status is not touched."""
    number = of.attempts.count() + 1
    content = {"number": number, "home": ["cpu-0"], "reason": Reason.ADMITTED}
    return Attempt.objects.create(job=of, status=status, **{**content, **fields})


def checkpoint(of: Attempt, folder: Path, step: int = 5, final: bool = False) -> Checkpoint:
    """A checkpoint of the attempt: a folder with two small files."""
    path = folder / of.job.public_id / f"step-{step}"
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (path / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 5)
    made = Checkpoint.objects.create(
        organization=of.job.organization,
        base_model=of.job.base_model,
        format=Checkpoint.Format.PEFT,
        step=step,
        path=str(path),
        bytes=1_301,
    )
    JobCheckpoint.objects.create(job=of.job, attempt=of, checkpoint=made, final=final)
    return made
