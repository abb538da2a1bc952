"""Submit an example job and follow its reward.

    export JIGSAW_URL=http://127.0.0.1:8000 JIGSAW_API_KEY=...     (make run prints both)
    python docs/examples/run.py docs/examples/arithmetic.json

Exits with 0 when the job has succeeded and its reward has risen.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

POLL_S = 2.0
#: Steps at each end whose mean reward is compared.
ENDS = 3
OVER = {"succeeded", "failed", "cancelled"}


def follow(client: httpx.Client, body: dict[str, Any], console: Console) -> int:
    answer = client.post("/v1/fine_tuning/jobs", json=body)
    if answer.is_error:
        console.print(answer.json()["error"]["message"], style="red")
        return 1
    job = answer.json()
    console.print(f"{job['id']}  {client.base_url}jobs/{job['id']}")
    rewards: list[float] = []
    while True:
        job = client.get(f"/v1/fine_tuning/jobs/{job['id']}").raise_for_status().json()
        rows = client.get(f"/v1/fine_tuning/jobs/{job['id']}/metrics").raise_for_status().json()["data"]
        for row in rows[len(rewards) :]:
            rewards.append(row["values"]["reward"])
            console.print(
                f"step {row['step'] + 1:3}  reward {rewards[-1]:.3f}  {'█' * round(30 * rewards[-1])}"
            )
        if job["status"] in OVER:
            break
        time.sleep(POLL_S)
    if job["status"] != "succeeded":
        console.print(job["status"], (job["error"] or {}).get("message", ""), style="red")
        return 1
    first, last = statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])
    console.print(f"reward {first:.3f} → {last:.3f}")
    return 0 if last > first else 1


def main() -> int:
    body = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    url, key = os.environ["JIGSAW_URL"], os.environ["JIGSAW_API_KEY"]
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
        return follow(client, body, Console())


if __name__ == "__main__":
    raise SystemExit(main())
