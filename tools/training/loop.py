"""The training loop: a schedule that follows running time, checkpoints, held-out losses, and a log of all of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tools.training.batches import CHAT_WINDOW, Batch, Mixture
from tools.training.model import Balance

PAUSE_S = 10.0
"""A step is charged at most so many seconds: what a stopped process slept is not training time."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Args:
        seconds: of running time; the learning rate's schedule spans them.
        rate: peak learning rate.
        warmup: steps until it is reached.
        floor: share of it that is left at the end.
        clip: largest norm of the gradient.
        decay: of weights, times the rate.
        balance: weight of the balance loss.
        text_weight: of the text's loss beside the chats'.
        checkpoint_s, report_s: running seconds between checkpoints, and between held-out reports.
    """

    seconds: float
    rate: float = 2e-3
    warmup: int = 100
    floor: float = 0.01
    clip: float = 1.0
    decay: float = 0.01
    balance: float = 0.01
    text_weight: float = 0.5
    checkpoint_s: float = 300.0
    report_s: float = 300.0

    def rate_at(self, step: int, elapsed: float) -> float:
        """Linear warm-up by steps, cosine by the share of running time that is spent."""
        share = min(1.0, elapsed / self.seconds)
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))
        return self.rate * min(1.0, (step + 1) / self.warmup) * cosine


def total_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Cross-entropy in nats, summed over the counted tokens; the head is computed for them alone."""
    tokens, counted = batch.tokens.to(model.device), batch.counted[:, 1:].to(model.device)
    positions = batch.positions.to(model.device)
    hidden = model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][counted])
    return F.cross_entropy(logits.float(), tokens[:, 1:][counted], reduction="sum")


def batch_name(batch: Batch) -> str:
    """chat or text."""
    return "chat" if batch.tokens.shape[1] == CHAT_WINDOW else "text"


@dataclass(frozen=True)
class _Part:
    """A thread's part of a step: gradients, losses of each batch and of the balance, choices of experts."""

    gradients: list[torch.Tensor]
    losses: torch.Tensor
    routed: torch.Tensor


@dataclass
class Progress:
    """What a run has done. `elapsed` is running time in seconds."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0


class Run:
    """A training run in a directory: `state.pt` to resume from and `log.jsonl`.

    Every step's data depends on the seed and the step alone, and nothing in the model draws random numbers, so
    the step is all the random state there is: a run that was killed goes on from its last checkpoint as if not.

    Args:
        model: in training form, already on its device.
        mixture: the data.
        recipe: how to train.
        directory: where the run's files are, made if missing.
        report: called with the model now and then; returns figures for the log.
        save: called with the model at every checkpoint.
        threads: that share a step on a CPU; gradients, so results too, depend on it in the last bits.
        dtype: that products are computed in.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: Any,
        mixture: Mixture,
        recipe: Recipe,
        directory: Path,
        *,
        report: Callable[[Any], dict[str, Any]],
        save: Callable[[Any], None],
        threads: int = 1,
        dtype: torch.dtype = torch.float32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.mixture, self.recipe, self.directory = model, mixture, recipe, directory
        self._report, self._save, self._clock, self._dtype = report, save, clock, dtype
        self._parameters = list(model.parameters())
        # Threads that meet once a step lose far less to other programs than threads that meet in every operator.
        self._threads = threads if model.device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=recipe.decay, fused=True
        )
        self._balance = Balance(model)
        self.progress = Progress()
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def _state_file(self) -> Path:
        return self.directory / "state.pt"

    @property
    def log_file(self) -> Path:
        """One JSON object a report."""
        return self.directory / "log.jsonl"

    def checkpoint(self) -> None:
        """Writes everything the run needs to go on, and never leaves half of it."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "load": self._balance.load,
            "progress": asdict(self.progress),
        }
        partial = self._state_file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state_file)
        self._save(self.model)

    def resume(self) -> bool:
        """Goes back to the last checkpoint, and forgets what was logged after it; False if there is none."""
        if not self._state_file.exists():
            return False
        state = torch.load(self._state_file, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._balance.load = state["load"]
        self.progress = Progress(**state["progress"])
        kept = [line for line in self.log() if line["step"] <= self.progress.step]
        self.log_file.write_text("".join(json.dumps(line) + "\n" for line in kept))
        return True

    def log(self) -> list[dict[str, Any]]:
        """What was logged so far."""
        if not self.log_file.exists():
            return []
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def train(self, last_step: int | None = None) -> None:
        """Trains until the recipe's seconds are spent, or `last_step` steps are done; reports and saves at the end."""
        progress, recipe = self.progress, self.recipe
        next_report = progress.elapsed + recipe.report_s / 5
        next_checkpoint = progress.elapsed + recipe.checkpoint_s
        losses: dict[str, list[float]] = {}
        self.model.train()
        while progress.elapsed < recipe.seconds and (last_step is None or progress.step < last_step):
            started = self._clock()
            for name, loss in self._step().items():
                losses.setdefault(name, []).append(loss)
            progress.elapsed += min(self._clock() - started, PAUSE_S)
            if progress.elapsed >= next_report:
                self._write(losses)
                losses, next_report = {}, progress.elapsed + recipe.report_s
            if progress.elapsed >= next_checkpoint:
                self.checkpoint()
                next_checkpoint = progress.elapsed + recipe.checkpoint_s
        self._write(losses)
        self.checkpoint()

    def _step(self) -> dict[str, float]:
        """One update; returns the training losses. Threads share the rows, and meet once a step."""
        progress, recipe = self.progress, self.recipe
        batches = self.mixture.batches(progress.step)
        shares = list(zip(*(batch.shares(self._threads) for batch in batches), strict=True))
        targets = [batch.targets() for batch in batches]
        parts = list(self._pool.map(lambda share: self._gradients(share, targets), shares))
        for i, parameter in enumerate(self._parameters):
            parameter.grad = sum((part.gradients[i] for part in parts[1:]), start=parts[0].gradients[i])
        torch.nn.utils.clip_grad_norm_(self._parameters, recipe.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.rate_at(progress.step, progress.elapsed)
        self._optimizer.step()
        self._balance.update(torch.stack([part.routed for part in parts]).sum(0))
        progress.step += 1
        progress.tokens += sum(batch.tokens.numel() for batch in batches)
        totals = torch.stack([part.losses for part in parts]).sum(0).tolist()
        names = [batch_name(batch) for batch in batches]
        return dict(zip([*names, "balance"], totals, strict=True))

    def _gradients(self, share: Sequence[Batch], targets: Sequence[int]) -> _Part:
        """A share's part of the step's loss and gradient; runs in a thread of the pool."""
        rows = sum(batch.tokens.numel() for batch in share)
        found, routed, gradients = [], [], [torch.zeros_like(p) for p in self._parameters]
        evenness = torch.zeros(())
        for batch, all_targets in zip(share, targets, strict=True):
            if not len(batch.tokens):
                found.append(torch.zeros(()))
                continue
            with torch.autocast(
                self.model.device.type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=False
            ):
                loss = total_loss(self.model, batch) / all_targets
            balance, counts = self._balance.take()
            balance = balance * (batch.tokens.numel() / rows / self._threads)
            weight = 1.0 if batch_name(batch) == "chat" else self.recipe.text_weight
            parts = torch.autograd.grad(weight * loss + self.recipe.balance * balance, self._parameters)
            torch._foreach_add_(gradients, parts)
            found.append(loss.detach().cpu())
            evenness += balance.detach().cpu()
            routed.append(counts)
        return _Part(gradients, torch.stack([*found, evenness]), torch.stack(routed).sum(0))

    def _write(self, losses: dict[str, list[float]]) -> None:
        """One line of the log, and the same for people."""
        progress = self.progress
        self.model.eval()
        line = {
            "step": progress.step,
            "tokens": progress.tokens,
            "elapsed_s": round(progress.elapsed, 1),
            "training": {name: sum(values) / len(values) for name, values in losses.items()},
            "held_out": self._report(self.model),
        }
        self.model.train()
        with self.log_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        left = max(0.0, self.recipe.seconds - progress.elapsed)
        speed = progress.tokens / max(progress.elapsed, 1e-9)
        print(f"[{left / 60:5.1f} min left, {speed:,.0f} tokens/s] {json.dumps(line)}", flush=True)
