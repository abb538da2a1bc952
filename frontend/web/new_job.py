"""The new-job page: the form, what it means as an API call while it is filled in, and the job it makes.

All three go from the same form data through ``request_of`` to the request that ``/v1`` takes, so the page
cannot promise anything else than the API does.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST
from pydantic import ValidationError

from backend.catalog.access import dataset_access
from backend.catalog.models import Dataset
from backend.catalog.selectors import datasets_all, files_page, models_all
from backend.catalog.services import PURPOSE, file_create
from backend.common.errors import InvalidRequest, NotFound, ServiceError
from backend.common.ids import new_id
from backend.jobs import requests
from backend.jobs.services import job_create
from backend.tenants.access import Actor, require_write
from frontend.web import spec_form
from frontend.web.doors import for_members, page
from workers.spec import JobSpec, default_learning_rate

FILES_OFFERED = 50
TOKEN = "idempotency_token"
#: The input that shows an error about a path of the request, where the two are named differently.
INPUT_OF = {requests.GRADER_PATH: "grader", f"{spec_form.RL}.tuning.type": spec_form.TUNING}

EXAMPLE_GRADER = {
    "type": "string_check",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
EXAMPLE_SOURCE = '''def grade(sample, item):
    """Return a number; higher is better. `item` is the row, `sample["output_text"]` the completion."""
    return 1.0 if item["answer"] in sample["output_text"] else 0.0
'''


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
        errors = _errors(actor, data) or {_input_of(error.param): error.message}
        return _form(request, actor, data, errors, status=error.status)
    return redirect("web:job", job_id=job.public_id)


@require_POST
@for_members
def preview(request: HttpRequest, actor: Actor) -> HttpResponse:
    """``{"errors": {input: text}, "curl": text, "sums": {...}}`` for the form as it is now."""
    require_write(actor)
    data = request.POST
    return JsonResponse(
        {
            "errors": _errors(actor, data),
            "curl": curl(short_request(actor, data), request.build_absolute_uri("/v1")),
            "sums": sums(request_of(data)["rl"]),
        }
    )


@require_POST
@for_members
def upload(request: HttpRequest, actor: Actor) -> HttpResponse:
    """Take a training file in; answers with what the form's list needs, or with the reason it is refused."""
    try:
        require_write(actor)
        sent = request.FILES.get("file")
        if not isinstance(sent, UploadedFile):
            raise InvalidRequest("Choose a file first.", param="file")
        file = file_create(actor=actor, filename=sent.name or "", purpose=PURPOSE, chunks=sent.chunks())
    except ServiceError as error:
        return JsonResponse({"error": error.message}, status=error.status)
    return JsonResponse(
        {"id": file.public_id, "filename": file.filename, "rows": file.rows, "fields": sorted(file.fields)},
        status=201,
    )


# ---------------------------------------------------------------- the form


def _first_data(actor: Actor) -> QueryDict:
    """The form's data before anybody has touched it: the first model and dataset with their best settings."""
    data = QueryDict(mutable=True)
    models, datasets = models_all(actor.organization), datasets_all()
    data["model"] = models[0].name if models else ""
    data["training_file"] = datasets[0].name if datasets else ""
    data["grader_from"] = "dataset" if datasets else "json"
    data["grader_json"] = json.dumps(EXAMPLE_GRADER, indent=2)
    data["grader_python"] = EXAMPLE_SOURCE
    data["seed"] = "0"
    return data


def _form(
    request: HttpRequest, actor: Actor, data: QueryDict, errors: dict[str, str], status: int = 200
) -> HttpResponse:
    datasets = datasets_all()
    suitable = {dataset.name: values_for(dataset) for dataset in datasets}
    plain = spec_form.default_values()
    start = suitable.get(data.get("training_file", ""), plain)
    values = spec_form.shown_values(data, start) if request.method == "POST" else start
    known = _named_inputs(values)
    context = {
        "data": data,
        "errors": errors,
        "loose_errors": [said for name, said in errors.items() if name not in known],
        "models": models_all(actor.organization),
        "datasets": datasets,
        "files": files_page(actor.organization, limit=FILES_OFFERED).items,
        "sections": spec_form.sections(values),
        "token": data.get(TOKEN) or new_id("form"),
        "page_data": {
            "suitable": {name: spec_form.flat(tree, spec_form.RL) for name, tree in suitable.items()},
            "plain": spec_form.flat(plain, spec_form.RL),
            "about": {dataset.name: dataset.description for dataset in datasets},
            "graders": {dataset.name: dataset.grader for dataset in datasets},
            "learning_rates": {kind: default_learning_rate("grpo", kind) for kind in ("lora", "full")},
        },
    }
    return page(request, actor, "web/new_job.html", context, status=status)


def values_for(dataset: Dataset) -> dict[str, Any]:
    """Every setting a job on the dataset has unless it says otherwise; None: as its algorithm says."""
    return requests.merge(spec_form.default_values(), dataset.recommended)


def _brought(dataset: Dataset) -> requests.Data:
    return requests.Data(
        rows=dataset.rows,
        grader=dataset.grader,
        environment=dataset.environment,
        recommended=dataset.recommended,
    )


def _named_inputs(values: Mapping[str, Any]) -> set[str]:
    inputs = {"model", "training_file", "grader", "seed", "suffix", spec_form.TUNING}
    for section in spec_form.sections(values):
        inputs |= {knob.path for knob in section.knobs}
        for variant in section.variants:
            inputs |= {knob.path for knob in variant.knobs}
    return inputs


# ---------------------------------------------------------------- from the form to the request


def request_of(data: QueryDict) -> dict[str, Any]:
    """The whole request the form describes, in the shape of ``POST /v1/fine_tuning/jobs``."""
    request: dict[str, Any] = {
        "model": data.get("model", ""),
        "training_file": data.get("training_file", ""),
        "method": {"type": "reinforcement", "reinforcement": {}},
        "rl": spec_form.rl_from_form(data),
        "seed": spec_form.number(data.get("seed", "").strip() or "0"),
    }
    grader = _grader(data)
    if grader is not None:
        request["method"]["reinforcement"]["grader"] = grader
    if data.get("suffix", "").strip():
        request["suffix"] = data["suffix"].strip()
    return request


def _grader(data: QueryDict) -> Any:
    """None leaves it to the dataset. Text that is no JSON stays text, for the check to refuse."""
    match data.get("grader_from"):
        case "json":
            text = data.get("grader_json", "")
            try:
                return json.loads(text)
            except ValueError:
                return text
        case "python":
            return {"type": "python", "source": data.get("grader_python", "").replace("\r\n", "\n")}
    return None


def short_request(actor: Actor, data: QueryDict) -> dict[str, Any]:
    """The same request without what would be chosen anyway."""
    request = request_of(data)
    base = _base_values(actor, request)
    said = spec_form.differences(request["rl"], base)
    short = {**request, "rl": said}
    if not said:
        del short["rl"]
    if not request["seed"]:
        del short["seed"]
    return short


def _base_values(actor: Actor, request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request that only names the algorithm and the kind of tuning gets."""
    said = {"tuning": {"type": request["rl"]["tuning"]["type"]}}
    asked = requests.JobRequest(model="-", training_file="-", rl=said)
    try:
        dataset = dataset_access(actor, request["training_file"])
        brought = _brought(dataset)
    except NotFound:
        brought = requests.Data(rows=1, grader=EXAMPLE_GRADER)
    try:
        return requests.resolve(asked, brought).rl.model_dump(mode="json")
    except InvalidRequest:
        return spec_form.default_values()


def _errors(actor: Actor, data: QueryDict) -> dict[str, str]:
    """Every field's first complaint, by the name of its input."""
    request = request_of(data)
    found: dict[str, str] = {}
    if not request["model"]:
        found["model"] = "Choose a model."
    if not request["training_file"]:
        found["training_file"] = "Choose a dataset or upload a file."
    grader = request["method"]["reinforcement"].get("grader")
    environment = None
    if grader is None:
        grader, environment = _of_dataset(actor, request["training_file"], found)
    elif not isinstance(grader, dict):
        found["grader"] = _json_complaint(data.get("grader_json", ""))
        grader = EXAMPLE_GRADER
    content = {
        "model": request["model"] or "-",
        "training_file": request["training_file"] or "-",
        "grader": grader,
        "environment": environment,
        "rl": request["rl"],
        "seed": request["seed"],
        "suffix": request.get("suffix"),
    }
    try:
        JobSpec.model_validate(content)
    except ValidationError as error:
        for path, said in spec_form.field_errors(error).items():
            within = path.removeprefix("grader").lstrip(".") if path.startswith("grader") else ""
            name = "grader" if path.startswith("grader") else _input_of(path)
            found.setdefault(name, f"{within}: {said}" if within else said)
    return found


def _of_dataset(
    actor: Actor, name: str, found: dict[str, str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The grader and the environment that the dataset brings."""
    try:
        dataset = dataset_access(actor, name)
    except NotFound:
        found.setdefault("grader", "An uploaded file brings no grader: write one as JSON or Python.")
        return EXAMPLE_GRADER, None
    return dataset.grader, dataset.environment


def _json_complaint(text: str) -> str:
    try:
        json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    return "a grader is a JSON object"


def _input_of(param: str | None) -> str:
    if param is None:
        return ""
    for path, name in INPUT_OF.items():
        if param == path or param.startswith(f"{path}."):
            return name
    return param


# ---------------------------------------------------------------- what the page says about it


def curl(request: Mapping[str, Any], api_url: str) -> str:
    body = json.dumps(request, indent=2, ensure_ascii=False)
    return (
        f"curl {api_url}/fine_tuning/jobs \\\n"
        '  -H "Authorization: Bearer $JIGSAW_API_KEY" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(body)}"
    )


def sums(rl: Mapping[str, Any]) -> dict[str, str]:
    """What the settings amount to; empty while a number is missing."""
    counts = [rl.get("steps"), rl.get("prompts_per_step"), rl.get("group_size"), rl.get("updates_per_step")]
    max_tokens = rl.get("sampling", {}).get("max_tokens")
    if not all(isinstance(count, int) and count > 0 for count in [*counts, max_tokens]):
        return {}
    steps, prompts, group, updates = counts
    samples = steps * prompts * group
    return {
        "Completions per step": f"{prompts * group:,}",
        "Completions in all": f"{samples:,}",
        "Optimizer steps": f"{steps * updates:,}",
        "Tokens sampled, at most": f"{samples * max_tokens:,}",
    }
