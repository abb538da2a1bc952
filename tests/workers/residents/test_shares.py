"""Shares limit for real: the threads that an operation of one computing thread uses."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workers.residents.shares import CpuLimit, GpuLimit

LARGE = torch.ones(512, 512)


def test_a_share_is_a_number_of_threads_of_each_computing_thread():
    """Also when the other set another number before this one's first operation, which torch takes over."""
    limit = CpuLimit(4)
    one, other = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def threads(share: float) -> int:
        with limit(share):
            LARGE @ LARGE
            return torch.get_num_threads()

    assert one.submit(threads, 0.25).result() == 1
    assert other.submit(threads, 0.5).result() == 2
    assert one.submit(torch.get_num_threads).result() == 1
    assert other.submit(torch.get_num_threads).result() == 2
    assert [one.submit(threads, share).result() for share in (0.01, 0.6, 1.0)] == [1, 2, 4]


#: In a process of its own, where no other thread begins or ends: prints how many threads each work began.
COUNT = """
import os, torch
from concurrent.futures import ThreadPoolExecutor
from workers.residents.shares import CpuLimit

limit, large = CpuLimit(3), torch.ones(512, 512)

def begun(share, work):
    with limit(share):
        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            work()
        return len(os.listdir("/proc/self/task")) - before

def product(): return large @ large
def pointwise(): return (large + 1).exp_()

pairs = [(work, ThreadPoolExecutor(1), ThreadPoolExecutor(1)) for work in (product, pointwise)]
for work, one, other in pairs:
    asked = [(one, 0.3), (other, 1.0), (one, 0.3), (one, 1.0), (other, 1.0)]
    print(*(thread.submit(begun, share, work).result() for thread, share in asked))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the process's threads")
def test_operations_begin_as_many_threads_as_the_share_has_for_each_computing_thread():
    made = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert made.stdout.split("\n")[:2] == ["0 2 0 2 0"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_part_of_a_gpu_takes_longer_forward_and_backward():
    limit = GpuLimit(0)
    weight = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def seconds(share: float) -> float:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with limit(share):
            for _ in range(3):
                (weight @ weight).sum().backward()
            began.record()
            for _ in range(5):
                (weight @ weight).sum().backward()
            ended.record()
        return began.elapsed_time(ended)

    assert seconds(0.25) > 2 * seconds(1.0)
