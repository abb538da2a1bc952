"""Shares: how much of a device a computing thread may use.

On a CPU the processor threads of an operation, a number that torch keeps for each thread. On a GPU a part of
its multiprocessors, by a green context where torch and the driver have them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.cuda import green_contexts

from workers.protocol import DeviceRef

log = logging.getLogger(__name__)

#: ``with limit(share):`` what the thread computes in the block uses that share of the device.
Limit = Callable[[float], AbstractContextManager[None]]


def limit_of(device: DeviceRef) -> Limit:
    return GpuLimit(device.index) if device.kind == "gpu" else CpuLimit(device.threads)


class CpuLimit:
    def __init__(self, threads: int) -> None:
        self._threads = threads

    @contextmanager
    def __call__(self, share: float) -> Iterator[None]:
        # A thread's first question sets it to what any other thread set last, so it must come first.
        torch.get_num_threads()
        torch.set_num_threads(max(1, round(self._threads * share)))
        yield


class GpuLimit:
    """A stream of a green context for each part of the multiprocessors in use.

    A stream and not a current context: the backward pass runs on a thread of autograd's own, on the streams
    of the forward pass. Leaving the block waits for the work, so that it is timed whole and that streams
    never overlap.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._parts: dict[int, tuple[Any, torch.cuda.Stream]] = {}
        self._supported = green_contexts.SUPPORTED
        if not self._supported:
            log.warning("this torch cannot divide %s: shares limit nothing", self._device)

    @contextmanager
    def __call__(self, share: float) -> Iterator[None]:
        stream = self._stream(share)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()

    def _stream(self, share: float) -> torch.cuda.Stream:
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        part = max(1, round(processors * share))
        if part < processors and self._supported:
            try:
                return self._part(part)
            except RuntimeError as error:
                self._supported = False
                log.warning("%s cannot be divided, shares limit nothing: %s", self._device, error)
        return torch.cuda.default_stream(self._device)

    def _part(self, processors: int) -> torch.cuda.Stream:
        if processors not in self._parts:
            made: Any = green_contexts.GreenContext.create(num_sms=processors, device_id=self._device.index)
            self._parts[processors] = (made, made.Stream())
        return self._parts[processors][1]
