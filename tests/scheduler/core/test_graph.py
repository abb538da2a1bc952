"""The sub-stage graph: edges of each mode as tables, ranks by hand, what holds in any order of finishing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.graph import Edge, EdgeKind, Graph, GraphNode, build, longest_paths, offered, validate
from scheduler.core.state import Kind, Mode, Outlook, Segment, Shape

#: Rollout 3 + 5 (late 9), then 1, 2 and 4 on the trainers.
SHORT = Outlook(
    rollout=(Segment(Kind.DECODE, 3), Segment(Kind.TAIL, 5, late_seconds=9)),
    train=(Segment(Kind.GRADE, 1), Segment(Kind.LOGPROB, 2), Segment(Kind.UPDATE, 4)),
)
#: The old log-probs may begin on finished groups; the update may not.
EARLY = Outlook(
    rollout=(Segment(Kind.PREFILL, 1), Segment(Kind.DECODE, 3), Segment(Kind.TAIL, 5), Segment(Kind.TAIL, 6)),
    train=(Segment(Kind.GRADE, 1, early=True), Segment(Kind.LOGPROB, 2, early=True), Segment(Kind.UPDATE, 4)),
)
ONE_PART = Outlook(rollout=(Segment(Kind.DECODE, 1),), train=(Segment(Kind.UPDATE, 1),))


def colocated(workers: int, mode: Mode = Mode.SYNC, eta: int = 0) -> Shape:
    everyone = tuple(range(workers))
    return Shape(everyone, everyone, mode, eta)


def edges(graph: Graph) -> list[str]:
    return sorted(f"{edge.kind}: {edge.before} -> {edge.after}" for edge in graph.edges)


def lines(text: str) -> list[str]:
    return sorted(line.strip() for line in text.strip().splitlines())


def ids(nodes: tuple[GraphNode, ...]) -> list[str]:
    return [node.id for node in nodes]


# ---------------------------------------------------------------- building


def test_the_nodes_of_a_step():
    graph = build(colocated(2), SHORT, first_step=7, steps=1)
    validate(graph)
    assert [(n.id, n.worker, n.part, n.gang, n.mergeable, n.yields) for n in graph.nodes] == [
        ("s7.w0.decode.0", 0, 0, "", False, False),
        ("s7.w0.tail.1", 0, 1, "", True, False),
        ("s7.w1.decode.0", 1, 0, "", False, False),
        ("s7.w1.tail.1", 1, 1, "", True, False),
        ("s7.w0.grade.t0", 0, 0, "", False, False),
        ("s7.w0.logprob.t1", 0, 1, "s7.logprob.t1", False, True),
        ("s7.w1.logprob.t1", 1, 1, "s7.logprob.t1", False, True),
        ("s7.w0.update.t2", 0, 2, "s7.update.t2", False, True),
        ("s7.w1.update.t2", 1, 2, "s7.update.t2", False, True),
    ]
    assert {n.step for n in graph.nodes} == {7}
    assert graph.nodes[-1].segment is SHORT.train[2]


def test_disaggregated_workers_do_only_their_own():
    graph = build(Shape((0, 1, 2), (5, 3)), SHORT, 0, 1)
    validate(graph)
    by_worker = Counter(node.worker for node in graph.nodes)
    assert by_worker == {0: 2, 1: 2, 2: 2, 5: 3, 3: 2}
    assert "s0.w5.grade.t0" in ids(graph.nodes)


SYNC_STEPS = """
    chain: s0.w0.decode.0 -> s0.w0.tail.1
    chain: s0.w1.decode.0 -> s0.w1.tail.1
    barrier: s0.w0.tail.1 -> s0.w0.grade.t0
    barrier: s0.w1.tail.1 -> s0.w0.grade.t0
    barrier: s0.w0.grade.t0 -> s0.logprob.t1
    barrier: s0.logprob.t1 -> s0.update.t2
    chain: s1.w0.decode.0 -> s1.w0.tail.1
    chain: s1.w1.decode.0 -> s1.w1.tail.1
    barrier: s1.w0.tail.1 -> s1.w0.grade.t0
    barrier: s1.w1.tail.1 -> s1.w0.grade.t0
    barrier: s1.w0.grade.t0 -> s1.logprob.t1
    barrier: s1.logprob.t1 -> s1.update.t2
    chain: s0.w0.tail.1 -> s1.w0.decode.0
    chain: s0.w1.tail.1 -> s1.w1.decode.0
    barrier: s0.update.t2 -> s1.w0.grade.t0
"""


@pytest.mark.parametrize(
    ("mode", "eta", "between"),
    [
        (Mode.SYNC, 0, "barrier"),
        (Mode.SYNC, 3, "barrier"),
        (Mode.STREAM, 0, "barrier"),
        (Mode.ASYNC, 0, "staleness"),
        (Mode.ASYNC, 1, None),
        (Mode.ONE_STEP_OFF, 0, None),
        (Mode.STREAM, 1, None),
    ],
)
def test_two_steps_of_two_workers(mode, eta, between):
    graph = build(colocated(2, mode, eta), SHORT, 0, 2)
    validate(graph)
    weights = [f"{between}: s0.update.t2 -> s1.w{w}.decode.0" for w in (0, 1)] if between else []
    assert edges(graph) == sorted(lines(SYNC_STEPS) + weights)


def test_a_rollout_waits_for_the_weights_that_it_may_still_use():
    def staleness(mode: Mode, eta: int) -> list[tuple[str, str]]:
        graph = build(colocated(1, mode, eta), ONE_PART, 4, 4)
        return [(e.before, e.after) for e in graph.edges if e.kind is EdgeKind.STALENESS]

    one_off = [("s4.update.t0", "s6.w0.decode.0"), ("s5.update.t0", "s7.w0.decode.0")]
    assert staleness(Mode.ASYNC, 1) == staleness(Mode.ONE_STEP_OFF, 0) == staleness(Mode.STREAM, 1) == one_off
    assert staleness(Mode.ONE_STEP_OFF, 9) == one_off
    assert staleness(Mode.ASYNC, 2) == [("s4.update.t0", "s7.w0.decode.0")]
    assert len(staleness(Mode.ASYNC, 0)) == 3
    assert staleness(Mode.SYNC, 0) == staleness(Mode.STREAM, 0) == []


def test_streaming_begins_with_the_thin_ends_of_the_tails():
    graph = build(colocated(2, Mode.STREAM), EARLY, 0, 1)
    validate(graph)
    assert edges(graph) == lines("""
        chain: s0.w0.prefill.0 -> s0.w0.decode.1
        chain: s0.w0.decode.1 -> s0.w0.tail.2
        chain: s0.w0.tail.2 -> s0.w0.tail.3
        chain: s0.w1.prefill.0 -> s0.w1.decode.1
        chain: s0.w1.decode.1 -> s0.w1.tail.2
        chain: s0.w1.tail.2 -> s0.w1.tail.3
        stream: s0.w0.tail.2 -> s0.w0.grade.t0
        stream: s0.w1.tail.2 -> s0.w0.grade.t0
        barrier: s0.w0.grade.t0 -> s0.logprob.t1
        barrier: s0.logprob.t1 -> s0.update.t2
        barrier: s0.w0.tail.3 -> s0.update.t2
        barrier: s0.w1.tail.3 -> s0.update.t2
    """)


def test_early_counts_only_when_streaming():
    graph = build(colocated(1), EARLY, 0, 1)
    assert "barrier: s0.w0.tail.3 -> s0.w0.grade.t0" in edges(graph)
    assert not [edge for edge in graph.edges if edge.kind is EdgeKind.STREAM]


@pytest.mark.parametrize(
    ("rollout", "begins"),
    [
        ((Kind.PREFILL, Kind.DECODE), "s0.w0.prefill.0"),
        ((Kind.TAIL, Kind.TAIL), "s0.w0.tail.0"),
        ((Kind.DECODE, Kind.TAIL, Kind.TOOL, Kind.PREFILL, Kind.TAIL), "s0.w0.prefill.3"),
    ],
)
def test_where_a_stream_begins(rollout, begins):
    outlook = Outlook(tuple(Segment(kind, 1) for kind in rollout), EARLY.train)
    (stream,) = (
        e for e in build(colocated(1, Mode.STREAM), outlook, 0, 1).edges if e.kind is EdgeKind.STREAM
    )
    assert (stream.before, stream.after) == (begins, "s0.w0.grade.t0")


def test_a_step_is_not_over_before_its_rollouts_even_if_all_parts_are_early():
    train = (Segment(Kind.LOGPROB, 1, early=True), Segment(Kind.UPDATE, 1, early=True))
    graph = build(colocated(1, Mode.STREAM), Outlook(EARLY.rollout, train), 0, 1)
    assert "stream: s0.w0.tail.2 -> s0.logprob.t0" in edges(graph)
    assert "barrier: s0.w0.tail.3 -> s0.update.t1" in edges(graph)


def test_outlooks_with_one_chain_or_none():
    evaluation = build(colocated(2), Outlook(rollout=SHORT.rollout), 0, 2)
    assert {edge.kind for edge in evaluation.edges} == {EdgeKind.CHAIN} and len(evaluation.edges) == 6
    tuning = build(Shape((), (0, 1)), Outlook(train=SHORT.train), 0, 2)
    assert [(e.before, e.after) for e in tuning.edges] == [
        ("s0.w0.grade.t0", "s0.logprob.t1"),
        ("s0.logprob.t1", "s0.update.t2"),
        ("s0.update.t2", "s1.w0.grade.t0"),
        ("s1.w0.grade.t0", "s1.logprob.t1"),
        ("s1.logprob.t1", "s1.update.t2"),
    ]
    assert build(colocated(1), Outlook(), 0, 2) == build(colocated(1), SHORT, 0, 0) == Graph((), ())


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (Shape((), (0,)), "2 rollout parts, but no rollout workers"),
        (Shape((0,), ()), "3 train parts, but no train workers"),
        (Shape((0, 0), (0,)), "rollout workers .* twice"),
        (Shape((0,), (1, 1)), "train workers .* twice"),
        (Shape((0,), (0,), Mode.ASYNC, -1), "max_staleness is -1"),
    ],
)
def test_shapes_that_cannot_run_are_refused(shape, says):
    with pytest.raises(ValueError, match=says):
        build(shape, SHORT, 0, 1)


def test_edges_stay_linear_in_the_workers():
    outlook = Outlook(
        tuple(Segment(Kind.TAIL, 1) for _ in range(8)), tuple(Segment(Kind.UPDATE, 1) for _ in range(8))
    )
    graph = build(colocated(64), outlook, 0, 2)
    assert len(graph.nodes) == 64 * 16 * 2
    # Rollout chains, train chain, gathering, weights.
    assert len(graph.edges) == 64 * 15 + 15 + 2 * 64 + 64


# ---------------------------------------------------------------- offered


def test_a_gang_is_offered_whole_once_everything_before_it_is_over():
    graph = build(colocated(2), SHORT, 0, 2)
    assert ids(offered(graph, set(), set())) == ["s0.w0.decode.0", "s0.w1.decode.0"]
    done = {"s0.w0.decode.0", "s0.w0.tail.1", "s0.w1.decode.0"}
    assert ids(offered(graph, done, set())) == ["s0.w1.tail.1"]
    assert offered(graph, done, {"s0.w1.tail.1"}) == ()
    done |= {"s0.w1.tail.1", "s0.w0.grade.t0"}
    assert ids(offered(graph, done, set())) == ["s0.w0.logprob.t1", "s0.w1.logprob.t1"]
    done |= {"s0.w0.logprob.t1"}
    assert offered(graph, done, {"s0.w1.logprob.t1"}) == ()
    done |= {"s0.w1.logprob.t1"}
    assert ids(offered(graph, done, {"s0.w0.update.t2"})) == ["s0.w1.update.t2"]
    done |= {"s0.w0.update.t2"}
    assert ids(offered(graph, done, set())) == ["s0.w1.update.t2"]
    done |= {"s0.w1.update.t2"}
    assert ids(offered(graph, done, set())) == ["s1.w0.decode.0", "s1.w1.decode.0"]


def test_ids_of_other_steps_do_no_harm_and_what_yielded_is_offered_again():
    graph = build(colocated(1), ONE_PART, 3, 1)
    done = {"s2.w0.update.t0", "s3.w0.decode.0"}
    assert offered(graph, done, {"s3.w0.update.t0"}) == ()
    assert ids(offered(graph, done, set())) == ["s3.w0.update.t0"]


def run_ahead(shape: Shape) -> set[int]:
    """Steps whose rollouts are done when nothing trains."""
    graph, done = build(shape, ONE_PART, 10, 8), set()
    while free := [node for node in offered(graph, done, set()) if not node.gang]:
        done |= {node.id for node in free}
    return {node.step for node in graph.nodes if node.id in done}


def test_rollouts_run_ahead_as_far_as_allowed_and_no_further():
    assert run_ahead(colocated(2)) == {10}
    assert run_ahead(colocated(2, Mode.ONE_STEP_OFF)) == {10, 11}
    assert run_ahead(colocated(2, Mode.ASYNC, 0)) == {10}
    assert run_ahead(colocated(2, Mode.ASYNC, 3)) == {10, 11, 12, 13}
    assert run_ahead(colocated(2, Mode.STREAM)) == {10}
    assert run_ahead(colocated(2, Mode.STREAM, 2)) == {10, 11, 12}


# ---------------------------------------------------------------- ranks


def test_longest_paths_end_with_the_own_step():
    paths = longest_paths(build(colocated(2), SHORT, 0, 2))
    for step in (0, 1):
        for worker in (0, 1):
            assert paths[f"s{step}.w{worker}.decode.0"] == 3 + 9 + 1 + 2 + 4
            assert paths[f"s{step}.w{worker}.tail.1"] == 9 + 1 + 2 + 4
            assert paths[f"s{step}.w{worker}.logprob.t1"] == 2 + 4
            assert paths[f"s{step}.w{worker}.update.t2"] == 4
        assert paths[f"s{step}.w0.grade.t0"] == 1 + 2 + 4


def test_a_tail_without_a_quartile_counts_its_median_and_others_are_not_late():
    outlook = Outlook((Segment(Kind.DECODE, 3, late_seconds=50), Segment(Kind.TAIL, 5)), SHORT.train)
    paths = longest_paths(build(colocated(1), outlook, 0, 1))
    assert paths["s0.w0.decode.0"] == 3 + 5 + 7


def test_while_streaming_the_longer_of_two_ways_counts():
    paths = longest_paths(build(colocated(1, Mode.STREAM), EARLY, 0, 1))
    assert paths["s0.w0.decode.1"] == 3 + 5 + 6 + 4  # not 3 + 1 + 2 + 4, the way of the early parts
    long_early = (Segment(Kind.LOGPROB, 20, early=True), Segment(Kind.UPDATE, 4))
    paths = longest_paths(build(colocated(1, Mode.STREAM), Outlook(EARLY.rollout, long_early), 0, 1))
    assert paths["s0.w0.tail.2"] == 5 + 20 + 4
    assert paths["s0.w0.tail.3"] == 6 + 4


def test_a_gang_is_as_long_as_its_longest_node():
    def node(worker: int, seconds: float) -> GraphNode:
        segment = Segment(Kind.UPDATE, seconds)
        return GraphNode(f"s0.w{worker}.update.t1", 0, worker, 1, "s0.update.t1", segment, False, True)

    first = GraphNode("s0.w0.grade.t0", 0, 0, 0, "", Segment(Kind.GRADE, 1), False, False)
    graph = Graph((node(0, 2), first, node(1, 8)), (Edge(first.id, "s0.update.t1", EdgeKind.BARRIER),))
    validate(graph)
    assert longest_paths(graph) == {"s0.w0.grade.t0": 9, "s0.w0.update.t1": 2, "s0.w1.update.t1": 8}


# ---------------------------------------------------------------- validate


def test_problems_are_named():
    graph = build(colocated(2), SHORT, 0, 1)

    def refuse(says: str, nodes=graph.nodes, more: tuple[Edge, ...] = ()):
        with pytest.raises(ValueError, match=says):
            validate(Graph(nodes, graph.edges + more))

    refuse("unknown id nope", more=(Edge("nope", "s0.update.t2", EdgeKind.CHAIN),))
    refuse("unknown id s9", more=(Edge("s0.update.t2", "s9", EdgeKind.CHAIN),))
    refuse(r"unknown id s0\.w1\.update\.t2", more=(Edge("s0.w1.update.t2", "s0.w0.tail.1", EdgeKind.CHAIN),))
    refuse(r"s0\.w0\.decode\.0: 2 nodes", nodes=(*graph.nodes, graph.nodes[0]))
    refuse(r"gang s0\.update\.t2 is not whole: workers \[0\] of \[0, 1\]", nodes=graph.nodes[:-1])
    refuse(
        r"cycle: s0\.update\.t2 -> s0\.update\.t2$",
        more=(Edge("s0.update.t2", "s0.update.t2", EdgeKind.CHAIN),),
    )


def test_a_gang_is_one_part_of_one_step():
    graph = build(colocated(2), SHORT, 0, 1)
    for other in ({"step": 1}, {"part": 1}):
        with pytest.raises(ValueError, match=r"gang s0\.update\.t2: its nodes are different parts"):
            validate(Graph((*graph.nodes[:-1], replace(graph.nodes[-1], **other)), graph.edges))


def test_a_cycle_is_named_by_those_on_it():
    graph = build(colocated(2), SHORT, 0, 2)
    back = Edge("s0.update.t2", "s0.w1.tail.1", EdgeKind.CHAIN)
    with pytest.raises(ValueError, match="cycle: ") as refusal:
        validate(Graph(graph.nodes, (*graph.edges, back)))
    ring = str(refusal.value).removeprefix("cycle: ").split(" -> ")
    assert ring[0] == ring[-1]
    assert set(ring) == {"s0.w1.tail.1", "s0.w0.grade.t0", "s0.logprob.t1", "s0.update.t2"}
    pairs = {(edge.before, edge.after) for edge in (*graph.edges, back)}
    assert set(pairwise(ring)) <= pairs


# ---------------------------------------------------------------- any order


def segments(kinds: list[Kind]) -> st.SearchStrategy[tuple[Segment, ...]]:
    one = st.builds(
        Segment, st.sampled_from(kinds), st.floats(0, 9), late_seconds=st.floats(0, 9), early=st.booleans()
    )
    return st.lists(one, min_size=1, max_size=4).map(tuple)


OUTLOOKS = st.builds(
    Outlook,
    segments([Kind.PREFILL, Kind.DECODE, Kind.TAIL, Kind.TOOL]),
    segments([Kind.GRADE, Kind.LOGPROB, Kind.UPDATE, Kind.SYNC]),
)
WORKERS = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(tuple)
SHAPES = st.builds(Shape, WORKERS, WORKERS, st.sampled_from(Mode), st.integers(0, 3))


def allowed_lag(shape: Shape) -> int:
    if shape.mode is Mode.SYNC:
        return 0
    return 1 if shape.mode is Mode.ONE_STEP_OFF else shape.max_staleness


def finish_in_any_order(graph: Graph, data: st.DataObject):
    """Yields what begins, with what is done at that moment."""
    done: set[str] = set()
    begun: set[str] = set()
    while len(done) < len(graph.nodes):
        free = sorted(node.id for node in offered(graph, done, begun))
        choice = data.draw(st.sampled_from(free + sorted(begun - done)))
        if choice in begun:
            done.add(choice)
        else:
            begun.add(choice)
            yield choice, done


def is_over(nodes: list[GraphNode], done: set[str]) -> bool:
    return all(node.id in done for node in nodes)


@settings(max_examples=60, deadline=None)
@given(SHAPES, OUTLOOKS, st.integers(0, 5), st.integers(1, 4), st.data())
def test_in_any_order_of_finishing_the_modes_promises_hold(shape, outlook, first, steps, data):
    graph = build(shape, outlook, first, steps)
    validate(graph)
    nodes = {node.id: node for node in graph.nodes}
    train = [n for n in graph.nodes if n.id.endswith(f".t{n.part}")]
    rollout = [n for n in graph.nodes if n not in train]
    assert len(rollout) == steps * len(shape.rollout_workers) * len(outlook.rollout)
    for id, done in finish_in_any_order(graph, data):
        node = nodes[id]
        if node in rollout:
            needed = [n for n in train if n.step < node.step - allowed_lag(shape)]
            own = [n for n in rollout if n.worker == node.worker]
            needed += [n for n in own if (n.step, n.part) < (node.step, node.part)]
        else:
            needed = [n for n in train if (n.step, n.part) < (node.step, node.part)]
            parts = outlook.train[: node.part + 1]
            streams = shape.mode is Mode.STREAM and all(part.early for part in parts)
            if not streams or node.part == len(outlook.train) - 1:
                needed += [n for n in rollout if n.step == node.step]
        assert is_over(needed, done)


@settings(max_examples=60, deadline=None)
@given(SHAPES, OUTLOOKS, st.integers(1, 3))
def test_a_node_with_others_behind_it_has_the_longer_way(shape, outlook, steps):
    graph = build(shape, outlook, 0, steps)
    paths = longest_paths(graph)
    assert set(paths) == {node.id for node in graph.nodes}
    for edge in graph.edges:
        for node in graph.units[edge.before]:
            for other in graph.units[edge.after]:
                if node.step == other.step:
                    assert paths[node.id] >= node.segment.seconds + paths[other.id]
