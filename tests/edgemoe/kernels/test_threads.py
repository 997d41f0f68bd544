"""Which threads a step gets."""

from __future__ import annotations

import pytest
import torch

from edgemoe.kernels import threads
from edgemoe.kernels.native import library as native


@pytest.fixture
def two_threads():
    """Torch at two threads, and as it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


needs_kernel = pytest.mark.skipif(not native.available(), reason="edgemoe's kernel does not run here")


@needs_kernel
def test_torch_has_one_thread_in_a_step_and_all_for_what_is_worth_it(two_threads):
    """Within a step one, for long operators as many as the kernel, and everything is as it was afterwards."""
    with threads.for_step():
        assert torch.get_num_threads() == 1
        with threads.for_product(100_000_000):
            assert torch.get_num_threads() == native.thread_count()
        with threads.for_product(1):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@needs_kernel
def test_an_error_in_a_step_gives_torch_its_threads_back(two_threads):
    """What is thrown out of a step must not leave the process slow."""
    with pytest.raises(KeyError), threads.for_step(), threads.for_product(100_000_000):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_without_the_kernel_torch_keeps_its_threads(two_threads, monkeypatch):
    """Torch's own kernel is the one that computes then."""
    monkeypatch.setattr(native, "available", lambda: False)
    with threads.for_step(), threads.for_product(1):
        assert torch.get_num_threads() == 2
