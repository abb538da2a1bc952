"""How rows read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from backend.jobs.models import Event, Job
from backend.jobs.states import JobStatus, Reason
from frontend.web import words

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def job(**fields: object) -> Job:
    return Job(
        **{"steps": 30, "status": JobStatus.QUEUED, "reason": Reason.DATA_ACCEPTED, "spec": {}, **fields}
    )


def test_every_status_has_a_word():
    assert set(words.STATUS_WORDS) == set(JobStatus)
    assert all(
        word.live == (not words.is_over(job(status=status))) for status, word in words.STATUS_WORDS.items()
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ahead": 2}, "2 ahead"),
        ({"wait_text": "needs 8 devices, the pool has 4", "ahead": 2}, "needs 8 devices, the pool has 4"),
        ({}, ""),
        ({"status": JobStatus.SUCCEEDED, "reason": Reason.COMPLETED}, ""),
        (
            {"status": JobStatus.FAILED, "reason": Reason.INVALID_DATA, "detail": "row 7"},
            "The data cannot be used: row 7",
        ),
        (
            {"reason": Reason.WORKER_LOST, "detail": "actor died"},
            "A process of ours died (actor died). Work since the last checkpoint is not billed.",
        ),
    ],
)
def test_a_job_says_why_it_is_as_it_is(fields, said):
    assert words.why(job(**fields)) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"),
        (0.4, "0 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations(seconds, said):
    assert words.duration(seconds) == said


@pytest.mark.parametrize(
    ("micro_usd", "said"),
    [
        (0, "$0.0000"),
        (4_920, "$0.004920"),
        (49_200, "$0.0492"),
        (9_999_999, "$10.0000"),
        (12_345_678, "$12.35"),
        (-1_500, "-$0.001500"),
    ],
)
def test_money(micro_usd, said):
    assert words.usd(micro_usd) == said


def test_time_left_is_the_steps_left_at_the_recent_pace():
    running = job(status=JobStatus.RUNNING, steps_done=20)
    assert words.seconds_left(running, 12.5) == 125
    assert words.seconds_left(running, None) is None
    assert words.seconds_left(job(), 12.5) is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(3, "just now"), (45, "45 s ago"), (150, "2 min ago"), (7300, "2 h ago"), (172_800, "2 d ago")],
)
def test_ago(seconds, said):
    assert words.ago(NOW - timedelta(seconds=seconds), NOW) == said


def test_a_sparkline_goes_from_edge_to_edge():
    assert words.sparkline([0.0, 0.5, 1.0], width=100, height=20, edge=2) == "2.0,18.0 50.0,10.0 98.0,2.0"
    assert words.sparkline([1.0, 1.0]) != ""
    assert words.sparkline([1.0]) == ""


def test_every_event_reads_as_a_line():
    data = {
        Event.Type.METRICS: {"step": 3, "values": {"reward": 0.5, "loss": 0.25}},
        Event.Type.SUBSTAGE: {
            "step": 3,
            "kind": "decode",
            "device": None,
            "started_at": 1.0,
            "ended_at": 2.5,
        },
        Event.Type.COST: {"cost_micro_usd": 4_920},
    }
    lines = {type: words.event_text(Event(type=type, message="said", data={})) for type in Event.Type}
    assert set(lines.values()) == {"said"}
    assert words.event_text(Event(type=Event.Type.METRICS, data=data[Event.Type.METRICS])) == (
        "Step 3 trained: reward 0.500, loss 0.2500."
    )
    assert words.event_text(Event(type=Event.Type.SUBSTAGE, data=data[Event.Type.SUBSTAGE])) == (
        "Step 3: decode on the host, 1.50 s."
    )
    assert words.event_text(Event(type=Event.Type.COST, data=data[Event.Type.COST])) == "$0.004920 so far."
