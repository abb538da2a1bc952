"""The new-job page: the form, what it means as an API call while it is filled in, and the job it makes.

All three go from the same form data through ``request_of`` to the request that ``/v1`` takes, so the page
cannot promise anything else than the API does.
"""

from __future__ import annotations

import json
from typing import Any

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST

from backend.catalog.models import Corpus, Dataset
from backend.catalog.selectors import corpora_all, datasets_all, files_page, models_all
from backend.catalog.services import CORPUS, PURPOSE, file_create
from backend.common.errors import InvalidRequest, ServiceError
from backend.common.ids import new_id
from backend.jobs.methods import method_of
from backend.jobs.models import JobCheckpoint
from backend.jobs.selectors import checkpoints_to_start_from
from backend.jobs.services import job_create
from backend.tenants.access import Actor, require_write
from frontend.web import spec_form
from frontend.web.doors import for_members, page
from frontend.web.form_examples import ENVIRONMENTS, GRADERS, SOURCE, WORLD_SOURCE
from frontend.web.form_request import base_values, curl, errors_of, input_of, request_of, short_request, sums
from frontend.web.spec_words import METHOD_WORDS, RL, ROWS
from workers.spec import ALGORITHMS, RLConfig

FILES_OFFERED = 50
TOKEN = "idempotency_token"


@require_http_methods(["GET", "POST"])
@for_members
def new_job(request: HttpRequest, actor: Actor) -> HttpResponse:
    require_write(actor)
    if request.method == "GET":
        return _form(request, actor, _first_data(actor), {})
    data = request.POST
    try:
        job = job_create(
            actor=actor, request=request_of(data), idempotency_key=data.get(TOKEN) or None, stimulus="console"
        )
    except ServiceError as error:
        errors = errors_of(actor, data) or {input_of(error.param): error.message}
        return _form(request, actor, data, errors, status=error.status)
    return redirect("web:job", job_id=job.public_id)


@require_POST
@for_members
def preview(request: HttpRequest, actor: Actor) -> HttpResponse:
    """For the form as it is now: ``{"errors": {input: text}, "curl": text, "sums": {...}, "usual": {...}}``,
    the last being what the inputs that are left empty will have.
    """
    require_write(actor)
    data = request.POST
    rl = request_of(data)["rl"]
    usual = spec_form.usual_values(rl)
    return JsonResponse(
        {
            "errors": errors_of(actor, data),
            "curl": curl(short_request(actor, data), request.build_absolute_uri("/v1")),
            "sums": sums(rl),
            "usual": {path: spec_form.said(value) for path, value in usual.items()},
        }
    )


@require_POST
@for_members
def upload(request: HttpRequest, actor: Actor) -> HttpResponse:
    """Take a file in; answers with what the form's lists need, or with the reason it is refused."""
    try:
        require_write(actor)
        sent = request.FILES.get("file")
        if not isinstance(sent, UploadedFile):
            raise InvalidRequest("Choose a file first.", param="file")
        purpose = request.POST.get("purpose", PURPOSE)
        file = file_create(actor=actor, filename=sent.name or "", purpose=purpose, chunks=sent.chunks())
    except ServiceError as error:
        return JsonResponse({"error": error.message}, status=error.status)
    return JsonResponse(
        {
            "id": file.public_id,
            "filename": file.filename,
            "rows": file.rows,
            "fields": sorted(file.fields),
            "purpose": file.purpose,
        },
        status=201,
    )


# ---------------------------------------------------------------- the form


def _first_data(actor: Actor) -> QueryDict:
    """The form's data before anybody has touched it: the first model and dataset with their best settings."""
    data = QueryDict(mutable=True)
    models, datasets = models_all(actor.organization), datasets_all()
    first = datasets[0] if datasets else None
    data["model"] = models[0].name if models else ""
    data["training_file"] = first.name if first else ""
    data["grader_from"] = "dataset" if first else "json"
    data["grader_json"] = _as_json(GRADERS["string_check"])
    data["grader_python"] = SOURCE
    data["environment_from"] = "dataset" if first else "none"
    data["environment_json"] = _as_json(ENVIRONMENTS["guessing_game"])
    data["environment_python"] = WORLD_SOURCE
    data["seed"] = "0"
    return data


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _form(
    request: HttpRequest, actor: Actor, data: QueryDict, errors: dict[str, str], status: int = 200
) -> HttpResponse:
    datasets = datasets_all()
    plain = spec_form.default_values()
    chosen = next((dataset for dataset in datasets if dataset.name == data.get("training_file")), None)
    start = values_for(chosen) if chosen else plain
    values = spec_form.shown_values(data, start) if request.method == "POST" else start
    starts = checkpoints_to_start_from(actor.organization, limit=FILES_OFFERED)
    known = _named_inputs(values)
    context = {
        "data": data,
        "errors": errors,
        "loose_errors": [said for name, said in errors.items() if name not in known],
        "models": models_all(actor.organization),
        "datasets": datasets,
        "files": files_page(actor.organization, limit=FILES_OFFERED, purpose=PURPOSE).items,
        "corpora": [*map(_built_in, corpora_all()), *_uploaded(actor)],
        "starts": starts,
        "algorithm": values["algorithm"],
        "methods": _methods(),
        "algorithms": ALGORITHMS.values(),
        "without_samples": " ".join(name for name, method in ALGORITHMS.items() if not method.rolls_out),
        "grader_examples": GRADERS,
        "environment_examples": ENVIRONMENTS,
        "sections": spec_form.sections(values),
        "token": data.get(TOKEN) or new_id("form"),
        "page_data": {
            "suitable": {dataset.name: _suitable(dataset) for dataset in datasets},
            "plain": spec_form.flat(plain, RL),
            "about": {dataset.name: dataset.description for dataset in datasets},
            "graders": {dataset.name: dataset.grader for dataset in datasets},
            "environments": {dataset.name: dataset.environment for dataset in datasets},
            "starts": {made.checkpoint.public_id: _tuning(made) for made in starts},
            "examples": {
                "grader": {name: _as_json(example) for name, example in GRADERS.items()},
                "environment": {name: _as_json(example) for name, example in ENVIRONMENTS.items()},
            },
        },
    }
    return page(request, actor, "web/new_job.html", context, status=status)


def values_for(dataset: Dataset, algorithm: str | None = None) -> dict[str, Any]:
    """Every setting a job on the dataset has unless it says otherwise, with that algorithm; None where the
    algorithm chooses.
    """
    default = RLConfig.model_fields["algorithm"].default
    asked = algorithm or dataset.recommended.get("algorithm", default)
    return {**base_values(dataset, {"algorithm": asked}), "algorithm": asked}


def _suitable(dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Flat settings by algorithm; of others than the dataset's own, under "", only what differs."""
    own = spec_form.flat(values_for(dataset), RL)
    found = {"": own}
    for name in ALGORITHMS:
        other = spec_form.flat(values_for(dataset, name), RL)
        found[name] = {path: value for path, value in other.items() if value != own.get(path)}
    return found


def _methods() -> list[tuple[str, str, str, list[Any]]]:
    """Each method's title, what its rows are, an example of one, and its algorithms."""
    return [
        (METHOD_WORDS[method], *ROWS[method], [a for a in ALGORITHMS.values() if method_of(a.name) == method])
        for method in METHOD_WORDS
    ]


def _tuning(made: JobCheckpoint) -> dict[str, Any]:
    return spec_form.flat(made.job.spec["rl"]["tuning"], spec_form.TUNING)


def _built_in(corpus: Corpus) -> tuple[str, str]:
    return corpus.name, f"{corpus.title} · {corpus.passages:,} passages"


def _uploaded(actor: Actor) -> list[tuple[str, str]]:
    files = files_page(actor.organization, limit=FILES_OFFERED, purpose=CORPUS).items
    return [(file.public_id, f"{file.filename} · {file.rows:,} passages") for file in files]


def _named_inputs(values: dict[str, Any]) -> set[str]:
    inputs = {"model", "training_file", "grader", "environment", "start_from", "seed", "suffix"}
    inputs |= {spec_form.TUNING, spec_form.ALGORITHM}
    for section in spec_form.sections(values):
        inputs |= {knob.path for knob in section.knobs}
        for variant in section.variants:
            inputs |= {knob.path for knob in variant.knobs}
    return inputs
