"""From what a browser sends of the new-job form to the request that ``/v1`` takes, and its faults."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from django.http import QueryDict
from pydantic import ValidationError

from backend.catalog.access import dataset_access
from backend.catalog.models import Dataset
from backend.common.errors import NotFound
from backend.jobs import requests
from backend.jobs.methods import GRADER_PATH, REINFORCEMENT, method_of
from backend.tenants.access import Actor
from frontend.web import spec_form
from frontend.web.spec_words import RL
from workers.spec import ALGORITHMS, JobSpec, RLConfig

#: The input that shows an error about a path of the request, where the two are named differently.
INPUT_OF = {
    GRADER_PATH: "grader",
    "grader": "grader",
    "environment": "environment",
    f"{RL}.tuning.type": spec_form.TUNING,
}
#: What stands in for a part that is wrong, so that the others are checked.
SOME_GRADER = {"type": "string_check", "reference": "-"}
NOT_SAID = object()


def request_of(data: QueryDict) -> dict[str, Any]:
    """The whole request the form describes, in the shape of ``POST /v1/fine_tuning/jobs``."""
    rl = spec_form.rl_from_form(data)
    request: dict[str, Any] = {
        "model": data.get("model", ""),
        "training_file": data.get("training_file", ""),
        "method": {"type": method_of(rl["algorithm"])},
        "rl": rl,
        "seed": spec_form.number(data.get("seed", "").strip() or "0"),
    }
    if _samples(rl):
        grader, environment = _chosen(data, "grader"), _chosen(data, "environment")
        if grader is not NOT_SAID:
            request["method"][REINFORCEMENT] = {"grader": grader}
        if environment is not NOT_SAID:
            request["environment"] = environment
    for name in ("start_from", "suffix"):
        if data.get(name, "").strip():
            request[name] = data[name].strip()
    return request


def _samples(rl: Mapping[str, Any]) -> bool:
    method = ALGORITHMS.get(rl["algorithm"])
    return method is None or method.rolls_out


def _chosen(data: QueryDict, name: str) -> Any:
    """A grader or an environment; ``NOT_SAID`` leaves it to the dataset, None says that there is none.

    Text that is no JSON stays text, for the check to refuse.
    """
    match data.get(f"{name}_from"):
        case "json":
            text = data.get(f"{name}_json", "")
            try:
                return json.loads(text)
            except ValueError:
                return text
        case "python":
            return {"type": "python", "source": data.get(f"{name}_python", "").replace("\r\n", "\n")}
        case "none":
            return None
    return NOT_SAID


# ---------------------------------------------------------------- the short form


def short_request(actor: Actor, data: QueryDict) -> dict[str, Any]:
    """The same request without what would be chosen anyway."""
    request = request_of(data)
    dataset = _dataset(actor, request["training_file"])
    said = spec_form.differences(request["rl"], base_values(dataset, request["rl"]))
    if "start_from" in request:
        # What is left out of it would be as the checkpoint's.
        said["tuning"] = request["rl"]["tuning"]
    short = {**request, "rl": said}
    if not said:
        del short["rl"]
    if not request["seed"]:
        del short["seed"]
    if "environment" in request and request["environment"] is None and _brings(dataset) is None:
        del short["environment"]
    return short


def base_values(dataset: Dataset | None, rl: Mapping[str, Any]) -> dict[str, Any]:
    """What a request has in the settings that it does not name, when it names the algorithm and the kind of
    tuning of ``rl``; None where the algorithm chooses.
    """
    plain = spec_form.default_values()
    if dataset is None:
        return plain
    asked = {name: value for name, value in rl.items() if name == "algorithm"}
    if "tuning" in rl:
        asked["tuning"] = {"type": rl["tuning"]["type"]}
    base = requests.merge(plain, requests.suitable(dataset.recommended, asked))
    # What was asked for here is what a short request must say.
    return {**base, "algorithm": dataset.recommended.get("algorithm", plain["algorithm"])}


def _dataset(actor: Actor, name: str) -> Dataset | None:
    try:
        return dataset_access(actor, name)
    except NotFound:
        return None


def _brings(dataset: Dataset | None) -> dict[str, Any] | None:
    return None if dataset is None else dataset.environment


# ---------------------------------------------------------------- what is wrong with it


def errors_of(actor: Actor, data: QueryDict) -> dict[str, str]:
    """Every field's first complaint, by the name of its input."""
    request = request_of(data)
    found: dict[str, str] = {}
    if not request["model"]:
        found["model"] = "Choose a model."
    if not request["training_file"]:
        found["training_file"] = "Choose a dataset or upload a file."
    content = {
        "model": request["model"] or "-",
        "training_file": request["training_file"] or "-",
        "rl": request["rl"],
        "seed": request["seed"],
        "suffix": request.get("suffix"),
        **_worlds(actor, request, data, found),
    }
    try:
        JobSpec.model_validate(content)
    except ValidationError as error:
        for path, reason in spec_form.field_errors(error).items():
            name = input_of(path)
            within = path.removeprefix(name).lstrip(".") if name in ("grader", "environment") else ""
            found.setdefault(name, f"{within}: {reason}" if within else reason)
    return found


def _worlds(
    actor: Actor, request: Mapping[str, Any], data: QueryDict, found: dict[str, str]
) -> dict[str, Any]:
    """Grader and environment as the job would have them."""
    if not _samples(request["rl"]):
        return {}
    dataset = _dataset(actor, request["training_file"])
    method = request["method"].get(REINFORCEMENT, {})
    worlds = {
        "grader": method.get("grader", dataset and dataset.grader),
        "environment": request.get("environment", _brings(dataset)),
    }
    for name, value in worlds.items():
        if value is not None and not isinstance(value, dict):
            found[name] = _json_complaint(data.get(f"{name}_json", ""), name)
            worlds[name] = SOME_GRADER if name == "grader" else None
    if "grader" not in method and dataset is None and worlds["environment"] is None:
        found.setdefault("grader", "An uploaded file brings no grader: write one as JSON or Python.")
        worlds["grader"] = SOME_GRADER
    elif found.get("environment"):
        # Whether a grader is missing depends on it.
        worlds["grader"] = worlds["grader"] or SOME_GRADER
    return worlds


def _json_complaint(text: str, name: str) -> str:
    try:
        json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    return f"{'an' if name == 'environment' else 'a'} {name} is a JSON object"


def input_of(param: str | None) -> str:
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
    try:
        config = RLConfig.model_validate(rl)
    except ValidationError:
        return {}
    per_step = config.prompts_per_step * config.samples_per_group
    of_all = {"Optimizer steps": f"{config.optimizer_steps:,}"}
    if not config.method.rolls_out:
        rows = {"Rows per step": f"{config.prompts_per_step:,}", "Sequences per step": f"{per_step:,}"}
        return rows | of_all
    samples = config.steps * per_step
    return {
        "Completions per step": f"{per_step:,}",
        "Completions in all": f"{samples:,}",
        **of_all,
        "Tokens sampled, at most": f"{samples * config.sampling.max_tokens:,}",
    }
