"""A pipeline's residents: a move takes along what the run started from."""

from __future__ import annotations

import asyncio

from tests.workers.local import device, of_kind, run, same_weights
from workers.protocol import CheckpointSaved, Ended, FailureKind, Offer, StepDone

PENALTY = {"loss": {"kl_beta": 0.5}, "steps": 3, "optimizer": {"learning_rate": 1e-2}}


def test_moving_takes_the_reference_along(start, cluster):
    """Each step on the other device, whose residents are gone when it comes back."""
    path = of_kind(asyncio.run(run(start("first"))), CheckpointSaved)[-1].path

    def alternate(offer: Offer):
        name = f"local/cpu{offer.step % 2}"
        if offer.kind == "prefill" and offer.step:
            cluster.evict(name)
        return device(name)

    steady = asyncio.run(run(start("steady", PENALTY, start_path=path)))
    moved = asyncio.run(run(start("moved", PENALTY, start_path=path), place=alternate))
    assert of_kind(moved, StepDone)[-1].metrics["kl"] > 1e-5
    assert same_weights(steady, moved)
    assert cluster.runs() == []


def test_a_start_that_is_gone_ends_the_attempt(start, cluster, tmp_path):
    reports = asyncio.run(run(start("out", start_path=str(tmp_path / "step-9"))))
    (ended,) = of_kind(reports, Ended)
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.MODEL_LOAD
    assert ended.failure.message == "the checkpoint step-9 to start from cannot be used"
    assert cluster.runs() == []
