"""The training loop: a schedule that follows running time, checkpoints, held-out losses, and a log."""

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
"""Maximum seconds that a step counts for: time in which the process was stopped is not training time."""


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a run.

    Args:
        seconds: running time; the learning rate's schedule spans it.
        rate: peak learning rate.
        warmup: steps until the peak.
        floor: fraction of the peak at the end.
        clip: maximum norm of the gradient.
        decay: weight decay, multiplied by the rate.
        balance: weight of the balance loss.
        text_weight: weight of the text's loss, relative to the chats'.
        checkpoint_s: running seconds between checkpoints.
        report_s: running seconds between held-out reports.
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
        """The learning rate: linear warm-up over steps, cosine over running time `elapsed` in seconds."""
        spent = min(1.0, elapsed / self.seconds)
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * spent))
        return self.rate * min(1.0, (step + 1) / self.warmup) * cosine


def total_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Cross-entropy in nats, summed over the counted tokens; computes the head for counted tokens only."""
    tokens, counted = batch.tokens.to(model.device), batch.counted[:, 1:].to(model.device)
    positions = batch.positions.to(model.device)
    hidden = model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][counted])
    return F.cross_entropy(logits.float(), tokens[:, 1:][counted], reduction="sum")


def batch_name(batch: Batch) -> str:
    """The batch's name in the log: "chat" or "text"."""
    return "chat" if batch.tokens.shape[1] == CHAT_WINDOW else "text"


@dataclass(frozen=True)
class _Part:
    """A thread's part of a step.

    Args:
        gradients: one for each parameter.
        losses: float32 [batches + 1]; the last is the balance loss.
        routed: int64 [layers, experts], times that each expert was chosen.
    """

    gradients: list[torch.Tensor]
    losses: torch.Tensor
    routed: torch.Tensor


@dataclass
class Progress:
    """Steps and tokens done, and running time in seconds."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0


class Run:
    """A training run in a directory, with `state.pt` to resume from and `log.jsonl`.

    A step's data depends only on the seed and the step, and the model draws no random numbers. The step is thus the
    whole random state: a killed run that resumes ends with the weights of an uninterrupted one.

    Args:
        model: the model in training form, on its device.
        mixture: the data.
        recipe: the hyperparameters.
        directory: directory of the run's files, made if missing.
        report: called with the model at every report; returns figures for the log.
        save: called with the model at every checkpoint.
        threads: number of threads that split a step on a CPU; it changes the last bits of gradients and results.
        dtype: dtype of products.
        clock: monotonic seconds.
        loss: returns the loss of a batch, summed over its counted tokens.
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
        loss: Callable[[Any, Batch], torch.Tensor] = total_loss,
    ) -> None:
        self.model, self.mixture, self.recipe, self.directory = model, mixture, recipe, directory
        self._report, self._save, self._clock, self._dtype = report, save, clock, dtype
        self._loss = loss
        self._parameters = list(model.parameters())
        # Threads that synchronize once a step lose less to other programs than threads that do so in every operator.
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
        """The log: a JSON object a report."""
        return self.directory / "log.jsonl"

    def checkpoint(self) -> None:
        """Writes the state that resuming needs, atomically, and calls `save`."""
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
        """Loads the last checkpoint and drops later lines of the log; returns False if there is no checkpoint."""
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
        """Reads the log; empty before the first report."""
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
        """Makes one update, with the rows split among the threads; returns the training losses."""
        progress, recipe = self.progress, self.recipe
        batches = self.mixture.batches(progress.step)
        splits = list(zip(*(batch.split(self._threads) for batch in batches), strict=True))
        targets = [batch.targets() for batch in batches]
        parts = list(self._pool.map(lambda split: self._gradients(split, targets), splits))
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

    def _gradients(self, split: Sequence[Batch], targets: Sequence[int]) -> _Part:
        """Computes a thread's part of the step's losses and gradients; runs in a thread of the pool."""
        rows = sum(batch.tokens.numel() for batch in split)
        found, gradients = [], [torch.zeros_like(p) for p in self._parameters]
        routed = torch.zeros_like(self._balance.load, dtype=torch.int64)
        evenness = torch.zeros(())
        for batch, all_targets in zip(split, targets, strict=True):
            if not len(batch.tokens):
                found.append(torch.zeros(()))
                continue
            with torch.autocast(
                self.model.device.type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=False
            ):
                loss = self._loss(self.model, batch) / all_targets
            balance, counts = self._balance.take()
            balance = balance * (batch.tokens.numel() / rows / self._threads)
            weight = 1.0 if batch_name(batch) == "chat" else self.recipe.text_weight
            parts = torch.autograd.grad(weight * loss + self.recipe.balance * balance, self._parameters)
            torch._foreach_add_(gradients, parts)
            found.append(loss.detach().cpu())
            evenness += balance.detach().cpu()
            routed += counts
        return _Part(gradients, torch.stack([*found, evenness]), routed)

    def _write(self, losses: dict[str, list[float]]) -> None:
        """Appends a line to the log and prints it with the time left and the speed."""
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
