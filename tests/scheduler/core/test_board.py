"""What a board believes between decisions: what is left, how fast it goes, who was served."""

from dataclasses import replace

import pytest

from scheduler.core.board import OVERDUE, Board
from scheduler.core.plan import decide
from scheduler.core.state import (
    POLICIES,
    Device,
    DeviceState,
    Kind,
    Merge,
    Mode,
    NodeState,
    Pipeline,
    Policy,
    Rehome,
    Resize,
    Shape,
    Snapshot,
    Start,
    Tenant,
    Wait,
    Yield,
)
from tests.scheduler.core.build import (
    TABLES,
    decode,
    device,
    part_of,
    pipeline,
    resident,
    run_on,
    steps,
    tail,
    update,
)

TRAIN = steps(tail(8), update(12))
BOTH = Shape((0, 1), (0, 1), Mode.SYNC)


def board_of(*pipelines: Pipeline, nodes=(), now: float = 0.0, shares: bool = True, **fields) -> Board:
    names = sorted({name for one in pipelines for name in one.home})
    fields.setdefault("tenants", tuple(Tenant(id) for id in sorted({p.tenant for p in pipelines})))
    fields.setdefault("devices", tuple(device(name) for name in names))
    world = Snapshot(now=now, pipelines=pipelines, nodes=tuple(nodes), tables=TABLES, **fields)
    board = Board.of(world, shares)
    board.untouch()
    return board


def start(board: Board, one: Pipeline, part: int, share: float = 1.0, worker: int = 0) -> str:
    """Offer the part and start it; the id of its node."""
    offered = part_of(one, part, worker, since=board.now)
    board.offer(offered)
    board.apply(Start(offered.id, one.id, one.home[worker], share, "test"))
    return offered.id


# ---------------------------------------------------------------- time


def test_alone_a_sub_stage_loses_a_second_a_second():
    one = pipeline(1, "d1", outlook=TRAIN)
    board = board_of(one)
    name = start(board, one, 1)
    board.tick(5.0)
    assert board.left_now(board.nodes[1][name]) == 7.0


def test_what_is_left_is_settled_at_the_old_speed_whenever_somebody_comes_or_goes():
    one, other = pipeline(1, "d1", outlook=TRAIN), pipeline(2, "d1", tenant=2, outlook=TRAIN)
    board = board_of(one, other)
    training = start(board, one, 1)
    board.tick(4.0)
    # 12 - 4 = 8 are left. On three quarters of the device an update goes at 3/4, a tail on one at 4/5.
    board.apply(Resize(training, 1, 0.75, "test"))
    rolling = start(board, other, 0, 0.25)
    assert board.nodes[1][training].left == 8.0
    assert board.speed == {(1, training): pytest.approx(0.75), (2, rolling): pytest.approx(0.8)}
    board.tick(8.0)
    # Four seconds later: 8 - 4 * 3/4 = 5, and 8 - 4 * 4/5 = 4.8.
    assert board.left_now(board.nodes[1][training]) == pytest.approx(5.0)
    assert board.left_now(board.nodes[2][rolling]) == pytest.approx(4.8)
    board.finish(2, rolling)
    assert board.nodes[1][training].left == pytest.approx(5.0)
    assert board.speed == {(1, training): pytest.approx(0.75)}  # until it is resized


def test_a_prediction_that_ran_out_leaves_a_part_of_the_whole():
    one = pipeline(1, "d1", outlook=TRAIN)
    board = board_of(one)
    name = start(board, one, 1)
    board.tick(100.0)
    assert board.left_now(board.nodes[1][name]) == pytest.approx(12 * OVERDUE)
    board.apply(Resize(name, 1, 0.5, "test"))
    assert board.nodes[1][name].left == 0  # nothing is left of the prediction, so it stays so
    assert board.overran(board.nodes[1][name])
    assert board.left_now(board.nodes[1][name]) == pytest.approx(12 * OVERDUE)


def test_what_is_left_counts_down_to_the_end_of_the_prediction():
    one = pipeline(1, "d1", outlook=TRAIN)
    board = board_of(one)
    name = start(board, one, 1)
    board.tick(11.0)
    board.apply(Resize(name, 1, 0.5, "test"))
    assert board.nodes[1][name].left == pytest.approx(1.0)
    assert not board.overran(board.nodes[1][name])


def test_a_revised_prediction_counts_from_now():
    one = pipeline(1, "d1", outlook=TRAIN)
    board = board_of(one)
    name = start(board, one, 1)
    board.tick(5.0)
    board.revise(1, {name: 20.0})
    board.tick(8.0)
    assert board.left_now(board.nodes[1][name]) == 17.0
    assert board.touched == {"d1"}


# ---------------------------------------------------------------- gangs


def gang(shares: bool) -> tuple[Board, list[str]]:
    """An update on two devices, on d2 beside a tail: its workers would go at 1 and at 3/4."""
    one = pipeline(1, "d1 d2", outlook=TRAIN, shape=BOTH)
    other = pipeline(2, "d2", outlook=TRAIN)
    board = board_of(one, other, shares=shares)
    names = []
    for worker in (0, 1):
        offered = part_of(one, 1, worker)
        board.offer(offered)
        names.append(offered.id)
    board.apply(Start(names[0], 1, "d1", 1.0, "test"))
    board.apply(Start(names[1], 1, "d2", 0.75, "test"))
    start(board, other, 0, 0.25)
    return board, names


@pytest.mark.parametrize(("shares", "speed"), [(True, 7 / 8), (False, 3 / 4)])
def test_a_gang_goes_at_one_speed(shares, speed):
    """With work split in proportion at the mean of its workers' speeds, else at the slowest's."""
    board, names = gang(shares)
    assert [board.speed[1, name] for name in names] == [pytest.approx(speed)] * 2
    board.tick(4.0)
    assert board.left_now(board.nodes[1][names[0]]) == pytest.approx(12 - 4 * speed)


def test_what_is_left_of_a_gang_goes_on_at_its_own_speed():
    board, names = gang(shares=True)
    board.tick(4.0)
    board.finish(1, names[0])
    assert board.speed[1, names[1]] == pytest.approx(0.75)
    assert board.speed == pytest.approx(Board.of(board.snapshot()).speed)


# ---------------------------------------------------------------- merging


def merged(tokens: int, prefill: float) -> tuple[float, int, float]:
    """Left, batch and seconds of a forward after a batch of 20 took in one of 40."""
    outlook = steps(
        replace(update(prefill), kind=Kind.PREFILL, tokens=1000),
        tail(10, batch=20, forward=0.02),
        tail(5, batch=40, forward=0.04),
        update(1),
    )
    one = pipeline(1, "d1 d2", outlook=outlook, shape=BOTH)
    nodes = [run_on(part_of(one, 1), "d1"), run_on(part_of(one, 2, 1, tokens=tokens), "d2")]
    board = board_of(one, nodes=nodes)
    board.apply(Merge(1, (nodes[1].id,), nodes[0].id, "test"))
    (left,) = board.nodes[1].values()
    assert not board.running["d2"]
    assert left.segment is not None
    return left.left, left.segment.batch, left.segment.forward_seconds


def test_a_merged_batch_decodes_together_until_the_shorter_ends():
    # The target's tail has 10 / 0.02 = 500 forwards in this part and 5 / 0.04 = 125 in the next: 625 of
    # 0.024 s in the mean. The source's has 125 of 0.04 s, half of which is the floor. Together a forward
    # takes 0.024 + (0.04 - 0.02) = 0.044 s: 125 of them are 5.5 s, then 500 alone 12 s. 5 of the 17.5 s are
    # the target's next part.
    assert merged(tokens=0, prefill=1.0) == (pytest.approx(12.5), 60, pytest.approx(0.044))


def test_a_merged_batch_prefills_what_came():
    # 1000 tokens take 2 s: 3000 take 6 s more.
    assert merged(tokens=3000, prefill=2.0)[0] == pytest.approx(18.5)


# ---------------------------------------------------------------- service


def test_tenants_are_charged_for_their_part_of_a_device():
    one, other = pipeline(1, "d1", tenant=1, outlook=TRAIN), pipeline(2, "d1", tenant=2, outlook=TRAIN)
    board = board_of(one, other, tenants=(Tenant(1), Tenant(2, weight=2.0)))
    training = start(board, one, 1, 0.75)
    rolling = start(board, other, 0, 0.25)
    board.tick(4.0)
    board.finish(1, training)
    board.finish(2, rolling)
    assert [board.tenants[id].service for id in (1, 2)] == [3.0, 0.5]  # 4 * 3/4; 4 * 1/4 / weight 2


def test_those_who_fuse_divide_the_charge_of_their_slot():
    outlook = steps(decode(10), update(1))
    pipelines = [pipeline(i, "d1", tenant=i, fusible=True, outlook=outlook) for i in (1, 2)]
    board = board_of(*pipelines)
    names = [start(board, one, 0) for one in pipelines]
    board.tick(6.0)
    for id, name in enumerate(names, start=1):
        board.finish(id, name)
    assert [board.tenants[id].service for id in (1, 2)] == [3.0, 3.0]


def test_who_holds_whole_devices_is_charged_once():
    """Under turns the devices are paid for from the beginning of the step to its end, used or not."""
    one = pipeline(1, "d1", holds=True, outlook=TRAIN)
    board = board_of(one)
    name = start(board, one, 1)
    board.tick(4.0)
    board.finish(1, name)
    board.tick(10.0)
    board.step_done(1)
    assert board.tenants[1].service == 10.0
    assert board.pipelines[1].holds == ()
    assert (board.pipelines[1].stepped, board.pipelines[1].step_began) == (1, 10.0)


# ---------------------------------------------------------------- rows


def test_a_sub_stage_that_yields_is_offered_again_with_what_is_left():
    one = pipeline(1, "d1", outlook=TRAIN)
    board = board_of(one)
    name = start(board, one, 1)
    board.tick(5.0)
    board.apply(Yield(name, 1, "test"))
    node = board.nodes[1][name]
    assert (node.state, node.device, node.left, node.since, node.yielded) == (
        NodeState.READY,
        None,
        7.0,
        5.0,
        True,
    )
    board.apply(Start(name, 1, "d1", 1.0, "test"))
    board.tick(7.0)
    assert board.left_now(board.nodes[1][name]) == 5.0


def test_a_lost_device_has_nothing_loaded():
    one = pipeline(1, "d1 d2", shape=BOTH, outlook=TRAIN)
    board = board_of(one, residents=(resident("d1", "base", 4, 0.0), resident("d2", "base", 4, 0.0)))
    board.set_device(replace(board.devices["d1"], state=DeviceState.LOST))
    assert list(board.residents) == [("d2", "base")]
    assert board.touched == {"d1"}
    assert board.admission


def test_events_touch_the_devices_that_they_concern():
    one = pipeline(1, "d1 d2", shape=BOTH, outlook=TRAIN)
    board = board_of(one, pipeline(2, "d3", outlook=TRAIN))
    board.offer(part_of(one, 0, 1))
    assert board.touched == {"d2"}
    board.untouch()
    board.apply(Rehome(1, ("d3", "d2"), "test"))
    assert board.touched == {"d3", "d2"}
    assert list(board.at_home["d1"]) == []
    board.untouch()
    board.end(1)
    assert board.touched == {"d3", "d2"}
    assert board.admission


def test_a_decision_leaves_nothing_touched_and_a_second_one_does_nothing():
    one = pipeline(1, "d1", outlook=TRAIN)
    board = board_of(one)
    board.offer(part_of(one, 0))
    for policy in (POLICIES["greedy"], Policy()):
        decided = decide(board, policy)
        assert decide(board, policy).actions == ()
    assert decided.refusals == ()


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Start("x", 1, "d1", 1.0, "test"), "start: pipeline 1 offers no node x"),
        (Resize("x", 7, 1.0, "test"), "resize: pipeline 7 offers no node x"),
        (Yield("s0.w0.0", 1, "test"), "yield: s0.w0.0 of pipeline 1 does not run on a device"),
        (Wait(7, 1.0, "test"), "wait: pipeline 7 is not running"),
        (Rehome(7, ("d1",), "test"), "rehome: pipeline 7 is not running"),
    ],
)
def test_an_action_that_has_no_object_is_refused(action, text):
    one = pipeline(1, "d1", outlook=TRAIN)
    board = board_of(one, nodes=(part_of(one, 0),))
    with pytest.raises(ValueError, match=text):
        board.apply(action)


def test_a_device_that_nobody_knows_any_more_keeps_others_going():
    one = pipeline(1, "gone", outlook=TRAIN)
    board = board_of(one, pipeline(2, "d1", outlook=TRAIN), devices=(Device("d1", "cpu", 10**10),))
    board.offer(part_of(one, 1))
    decided = decide(board, POLICIES["lookahead"])
    assert [(r.pipeline, r.text) for r in decided.refusals] == [(1, "its device is lost")]
    board.end(1)
    assert decide(board, POLICIES["lookahead"]).actions == ()


def test_what_is_around_a_pipeline_is_its_homes_and_whoever_computes_there():
    """The gang of a neighbour reaches further; who lives elsewhere is not looked at."""
    near, gang, far = (
        pipeline(1, "a", outlook=TRAIN),
        pipeline(2, "a b", outlook=TRAIN, shape=BOTH),
        pipeline(3, "c", outlook=TRAIN),
    )
    nodes = [run_on(part_of(near, 0), "a"), run_on(part_of(far, 0), "c")]
    board = board_of(near, gang, far, nodes=nodes)
    world = board.around(1)
    assert [p.id for p in world.pipelines] == [1, 2]
    assert [d.name for d in world.devices] == ["a"]
    assert [n.pipeline for n in world.nodes] == [1]
    assert board.around(4).pipelines == ()
