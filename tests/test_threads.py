"""Which threads a step gets."""

from __future__ import annotations

import pytest
import torch

from edgemoe.kernels import native, threads


@pytest.fixture
def two_threads():
    """Torch at two threads, and as it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not native.available(), reason="edgemoe's kernel does not run here")
def test_torch_has_one_thread_in_a_decode_step_only(two_threads):
    """A prompt has torch's threads, a new token has one, and both leave things as they were."""
    seen = []
    for decodes in (True, False):
        with threads.for_step(decodes=decodes):
            seen.append(torch.get_num_threads())
    assert seen == [1, 2]
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not native.available(), reason="edgemoe's kernel does not run here")
def test_an_error_in_a_step_gives_torch_its_threads_back(two_threads):
    """What is thrown out of a step must not leave the process slow."""
    with pytest.raises(KeyError), threads.for_step(decodes=True):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_without_the_kernel_torch_keeps_its_threads(two_threads, monkeypatch):
    """Torch's own kernel is the one that computes then."""
    monkeypatch.setattr(native, "available", lambda: False)
    with threads.for_step(decodes=True):
        assert torch.get_num_threads() == 2
