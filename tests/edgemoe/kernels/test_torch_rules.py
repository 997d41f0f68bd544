"""The number of threads of torch's operators within a step."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native

from edgemoe.kernels import torch_rules
from edgemoe.kernels.native import library as native


@pytest.fixture
def two_threads():
    """Sets torch to two threads for a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_native
def test_torch_has_one_thread_in_a_step_and_all_for_long_operators(two_threads):
    """A step sets one thread, a long operator as many as the kernel; the former number returns afterwards."""
    with torch_rules.one_thread():
        assert torch.get_num_threads() == 1
        with torch_rules.threads_for(100_000_000):
            assert torch.get_num_threads() == native.thread_count()
        with torch_rules.threads_for(1):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@needs_native
def test_an_error_in_a_step_restores_the_threads(two_threads):
    """An error in a step restores torch's number of threads."""
    with pytest.raises(KeyError), torch_rules.one_thread(), torch_rules.threads_for(100_000_000):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_without_the_kernel_torch_keeps_its_threads(two_threads, monkeypatch):
    """Without the compiled kernel torch's number of threads does not change."""
    monkeypatch.setattr(native, "available", lambda: False)
    with torch_rules.one_thread(), torch_rules.threads_for(1):
        assert torch.get_num_threads() == 2
