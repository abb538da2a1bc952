"""Taking files in, and adding models and datasets to the catalog."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from backend.catalog.models import BaseModel, Corpus, Dataset, File, file_id
from backend.common.errors import InvalidRequest, NotFound, TooLarge
from backend.tenants.access import Actor, require_write
from backend.tenants.models import Organization
from workers.data.builtin import (
    BuiltinCorpus,
    BuiltinDataset,
    builtin_named,
    write_builtin,
    write_corpora,
)
from workers.data.builtin.puzzles import DatasetUnavailable
from workers.data.rows import FileReport, check_corpus, check_jsonl
from workers.models.chat import ChatTokenizer
from workers.models.describe import describe

PURPOSE, CORPUS = "fine-tune", "corpus"
#: What may be uploaded, and how its rows are checked.
CHECKS: dict[str, Callable[[Path], FileReport]] = {PURPOSE: check_jsonl, CORPUS: check_corpus}
MODEL_NAME_CHARS = 150
WEIGHTS_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "LICENSE*")


def file_create(*, actor: Actor, filename: str, purpose: str, chunks: Iterable[bytes]) -> File:
    """Take a training file or a corpus in, row-checked; a bad one leaves nothing behind.

    The bytes go to disk as they come, so that a file of any size needs no more memory than a chunk.
    """
    require_write(actor)
    if purpose not in CHECKS:
        known = " or ".join(map(repr, CHECKS))
        raise InvalidRequest(f"purpose must be {known}; got {purpose!r}", param="purpose")
    name = _clean_filename(filename)
    public_id = file_id()
    folder = settings.FILES_DIR / actor.organization.public_id
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = folder / f".{public_id}.part"
    path = folder / f"{public_id}.jsonl"
    try:
        digest = _write(part, chunks, settings.MAX_UPLOAD_BYTES)
        report = CHECKS[purpose](part)
        _refuse_bad_rows(report)
        part.rename(path)
        return File.objects.create(
            public_id=public_id,
            organization=actor.organization,
            created_by=actor.user,
            filename=name,
            purpose=purpose,
            path=str(path),
            bytes=report.bytes,
            sha256=digest,
            rows=report.rows,
            fields=report.fields,
            kinds=report.kinds,
        )
    except BaseException:
        part.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


def file_remove(*, file: File) -> None:
    """Forget the file and, once that is certain, its bytes. ``jobs.services.file_delete`` asks first."""
    File.objects.filter(pk=file.pk).update(deleted_at=timezone.now())
    path = Path(file.path)
    transaction.on_commit(lambda: path.unlink(missing_ok=True))


def model_add(*, name: str, source: str, organization: Organization | None = None) -> BaseModel:
    """Add a model: a local folder in the Hugging Face layout, or the id of one on the hub.

    Adding the same again changes nothing; a name that means another folder is refused, because the name is
    what jobs and loaded weights go by.
    """
    if not name or len(name) > MODEL_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(
            f"A model's name has 1 to {MODEL_NAME_CHARS} printable characters.", param="name"
        )
    local = Path(source)
    folder = (local if local.is_dir() else _download(source)).resolve()
    try:
        facts = describe(folder)
        ChatTokenizer(folder)
    except ValueError as error:
        raise InvalidRequest(f"{source}: {error}", param="source") from None
    try:
        with transaction.atomic():
            return BaseModel.objects.create(
                organization=organization,
                name=name,
                path=str(folder),
                architecture=facts.architecture,
                parameters=facts.parameters,
                context_length=facts.context,
                bytes=facts.bytes,
            )
    except IntegrityError:
        known = BaseModel.objects.get(organization=organization, name=name)
    if known.path != str(folder):
        raise InvalidRequest(f"The name {name!r} belongs to {known.path}.", param="name", code="exists")
    return known


def datasets_register() -> list[Dataset]:
    """Write the built-in datasets and put them into the catalog; again, and nothing changes."""
    return [_dataset_register(built) for built in write_builtin(settings.FILES_DIR / "builtin")]


def dataset_on_demand(*, actor: Actor, name: str) -> Dataset:
    """A task of a library, made when it is first asked for, in seconds; ``NotFound`` says why not."""
    require_write(actor)
    try:
        return _dataset_register(builtin_named(name, settings.FILES_DIR / "builtin"))
    except DatasetUnavailable as error:
        raise NotFound(f"{error}.") from None


def corpora_register() -> list[Corpus]:
    """The same for the passages that tools search."""
    return [_corpus_register(built) for built in write_corpora(settings.FILES_DIR / "builtin")]


def _corpus_register(built: BuiltinCorpus) -> Corpus:
    content = {
        "title": built.title,
        "path": str(built.path),
        "passages": check_corpus(built.path).rows,
    }
    return Corpus.objects.update_or_create(name=built.name, defaults=content)[0]


def _dataset_register(built: BuiltinDataset) -> Dataset:
    report = check_jsonl(built.path)
    content = {
        "title": built.title,
        "description": built.description,
        "path": str(built.path),
        "rows": report.rows,
        "fields": report.fields,
        "kinds": report.kinds,
        "grader": None if built.grader is None else built.grader.model_dump(mode="json"),
        "environment": built.environment,
        "recommended": built.rl,
    }
    return Dataset.objects.update_or_create(name=built.name, defaults=content)[0]


def _clean_filename(filename: str) -> str:
    name = Path(filename.replace("\\", "/")).name
    if not name or not name.isprintable():
        raise InvalidRequest("The file needs a name of printable characters.", param="file")
    return name[-255:]


def _write(path: Path, chunks: Iterable[bytes], limit: int) -> str:
    """Write and sync the chunks; returns their SHA-256."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as stream:
        for chunk in chunks:
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"The file exceeds {limit:,} bytes.", param="file")
            digest.update(chunk)
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _refuse_bad_rows(report: FileReport) -> None:
    if report.ok:
        return
    more = report.error_count - 1
    rest = f" ({more:,} more line{'s' if more > 1 else ''} with errors)" if more else ""
    raise InvalidRequest(
        f"The file cannot be used: {report.errors[0].message}{rest}", param="file", code="invalid_file"
    )


def _download(repository: str) -> Path:
    """Fetch a model from the hub into the models folder, by the hub's own resumable client."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InvalidRequest(
            f"{repository} is no folder here, and fetching from the hub needs the package huggingface_hub: "
            "pip install 'jigsaw-rl[models]'",
            param="source",
        ) from None
    target = settings.MODELS_DIR / repository.replace("/", "--")
    try:
        return Path(snapshot_download(repository, local_dir=target, allow_patterns=list(WEIGHTS_PATTERNS)))
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{repository} is no folder here and cannot be fetched from the hub: {error}", param="source"
        ) from None
