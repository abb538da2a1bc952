"""The rollout resident: one engine, one computing thread, one batch of all runs that have sequences.

    submit, export, load_adapter, close ──► queue ──► computing thread: … call, STEP, call, call, STEP, …
    news ◄── mailbox of the run ◄── what each step did

A step makes one token for every running sequence and puts itself at the end of the queue as long as there
are any, so whatever is asked happens between two tokens of the others. Nobody waits but ``news``, for the
run's own mailbox and no longer than ``NEWS_WAIT_S``. A run that fails is taken out of the batch and told; the
step of the others is computed again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from workers.engines.engine import TorchEngine
from workers.engines.errors import NotFinite
from workers.engines.sequences import Rollout
from workers.models.chat import ChatTokenizer
from workers.protocol import DeviceRef
from workers.residents.base import Resident, timed
from workers.residents.errors import RunClosed
from workers.residents.mailbox import Mailbox, News, Stepped
from workers.timing import Ran

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Longest time that a request for news waits for something to tell.
NEWS_WAIT_S = 10.0


class RolloutResident(Resident):
    """A rollout engine over one base, with the adapters of the runs that share it."""

    _engine: TorchEngine | None = None

    def __init__(self, device: DeviceRef, model_path: str, precision: str) -> None:
        super().__init__(device, model_path, precision)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._share = 1.0
        self._boxes: dict[str, Mailbox] = {}  # changed by the computing thread alone
        self._stepping = False

    def load(self) -> None:
        """Load the weights if they are not; raises ``ModelLoad``."""
        self._compute(self._load)

    def _load(self) -> None:
        if self._engine is None:
            self._engine = TorchEngine(self._weights(), ChatTokenizer(self._path))

    @property
    def _loaded(self) -> TorchEngine:
        if self._engine is None:
            raise RuntimeError("load() comes first")
        return self._engine

    # ------------------------------------------------------------ a run's weights

    def load_adapter(
        self, run_key: str, version: int, tensors: dict[str, torch.Tensor], scaling: float, share: float
    ) -> Ran[None]:
        """Use these adapter weights for the run's next tokens, also of sequences under way."""
        return self._weigh(
            run_key, share, lambda: self._loaded.load_adapter(run_key, version, tensors, scaling)
        )

    def load_full(
        self, run_key: str, version: int, tensors: dict[str, torch.Tensor], share: float
    ) -> Ran[None]:
        """Replace the base weights: only for a resident that one run has to itself."""
        return self._weigh(run_key, share, lambda: self._loaded.load_weights(run_key, version, tensors))

    def _weigh(self, run_key: str, share: float, load: Callable[[], None]) -> Ran[None]:
        """Open the run if it is not, and give it weights."""
        self._enter(run_key)

        def weigh() -> Ran[None]:
            self._refuse_closed(run_key)
            ran = timed(load)
            self._boxes.setdefault(run_key, Mailbox(run_key))
            return ran

        return self._compute(weigh, share)

    # ------------------------------------------------------------ a run's sequences

    def submit(self, run_key: str, sequences: list[Rollout], share: float) -> None:
        """Queue unfinished sequences, new, continued or moved; they compute from now on.

        ``ValueError`` names the first bad one, and then none is queued.
        """

        def take_in(box: Mailbox) -> None:
            box.refuse_failed()
            self._loaded.import_(sequences)
            self._share = share
            box.put_in(sequences, *self._loaded.counts(run_key))
            self._go_on()

        self._between(run_key, take_in)

    def news(self, run_key: str, floor: int) -> News:
        """What happened to the run since the news before; each sequence is handed out once.

        Waits until a sequence ended, all that were submitted are prefilled (told once), ``floor`` or fewer
        are left unfinished, or ``NEWS_WAIT_S`` are over. Raises what went wrong for this run: ``NotFinite``,
        ``RunClosed``, or what the engine raised.
        """
        box = self._boxes.get(run_key)
        if box is None:
            raise RunClosed(run_key)
        return box.wait(floor, NEWS_WAIT_S)

    def export(self, run_key: str, keys: Collection[tuple[int, ...]] | None = None) -> list[Rollout]:
        """Take unfinished sequences of the run out, those of ``keys`` or all, for ``submit`` elsewhere.

        One that has ended meanwhile is not among them: it comes with the news.
        """

        def take_out(box: Mailbox) -> list[Rollout]:
            taken = self._loaded.export(run_key, keys)
            box.taken_out(taken, *self._loaded.counts(run_key))
            return taken

        return self._between(run_key, take_out)

    def forget(self, run_key: str) -> None:
        """Give back what was kept of turns that ended: none of the run's sequences goes on here."""
        self._between(run_key, lambda _: self._loaded.forget(run_key))

    def resize(self, run_key: str, share: float) -> None:
        """The share of the slot that the run computes in, and with it all runs of the batch: from the next
        token on.
        """
        if run_key in self._open:
            self._share = share

    def close(self, run_key: str, returns: bool = False) -> None:
        """Forget the run and its sequences; whoever waits for its news gets ``RunClosed``.

        It may come back if it ``returns``.
        """
        self._leave(run_key, returns)

        def forget() -> None:
            box = self._boxes.pop(run_key, None)
            if box is not None:
                box.close()
            if self._engine is not None:
                self._engine.drop_adapter(run_key)

        self._compute(forget)

    def _between(self, run_key: str, work: Callable[[Mailbox], T]) -> T:
        """Do it between two steps, for a run that is still open then."""

        def now() -> T:
            self._refuse_closed(run_key)
            box = self._boxes.get(run_key)
            if box is None:
                raise RunClosed(run_key)
            return work(box)

        return self._compute(now)

    def _compute(self, work: Callable[[], T], share: float | None = None) -> T:
        """Run it on the computing thread when its turn comes; the slot's share unless another is given."""

        def limited() -> T:
            with self._limit(self._share if share is None else share):
                return work()

        return self._thread.submit(limited).result()

    # ------------------------------------------------------------ the batch

    def _go_on(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        """A token for every run that computes, then the queue's turn."""
        keys = [key for key, box in self._boxes.items() if box.computes]
        self._stepping = False
        if not keys:
            return
        try:
            with self._limit(self._share):
                self._advance_or_fail(keys)
        finally:
            self._go_on()

    def _advance_or_fail(self, keys: Sequence[str]) -> None:
        """Whatever goes wrong is told to the run it belongs to: where that is not known, to each that fails
        alone.
        """
        try:
            self._advance(keys)
        except NotFinite as error:
            self._fail(error.run_key, error)
        except Exception as error:
            if len(keys) == 1:
                self._fail(keys[0], error)
                return
            log.warning("a step of %d runs failed (%s); each goes on alone", len(keys), error)
            for key in keys:
                self._advance_or_fail([key])

    def _advance(self, keys: Sequence[str]) -> None:
        ran = timed(lambda: self._loaded.decode(keys, max_steps=1))
        progress = ran.value
        if not progress.forwards and not progress.finished:
            raise MemoryError("the engine has no room for the run's sequences")
        finished: defaultdict[str, list[Rollout]] = defaultdict(list)
        for rollout in progress.finished:
            finished[rollout.request.run_key].append(rollout)
        for key in keys:
            step = Stepped(
                finished=finished[key],
                prompt_tokens=progress.prompt_of.get(key, 0),
                sampled_tokens=progress.sampled_of.get(key, 0),
                started_at=ran.started_at,
                ended_at=ran.ended_at,
            )
            self._boxes[key].stepped(step, *self._loaded.counts(key))

    def _fail(self, key: str, error: Exception) -> None:
        self._boxes[key].fail(error)
        self._loaded.drop(key)
