"""Measures and draws each expert's load by layer and domain, its skew, and the overlap of the domains' hot experts."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from tools.training.batches import Batch

HOT_ONE_IN = 4
"""One expert of this many is hot: the most loaded quarter of a layer."""

Loads = dict[str, torch.Tensor]
"""Domain -> float64 [layers, experts]: the fraction of a layer's (token, slot) pairs that go to each expert."""


@torch.no_grad()
def loads(model: Any, batches: dict[str, list[Batch]]) -> Loads:
    """Runs every domain's batches through the model and counts the experts that the routers choose.

    Args:
        model: a Qwen3MoeForCausalLM.
        batches: domain -> batches; padding does not count.
    """
    gates = [layer.mlp.gate for layer in model.model.layers]
    counts = torch.zeros(len(gates), model.config.num_experts, dtype=torch.int64)
    real = torch.empty(0, dtype=torch.bool)

    def counter(layer: int) -> Any:
        def count(module: Any, inputs: Any, outputs: Any) -> None:
            chosen = outputs[2].cpu()[real].flatten()
            counts[layer] += torch.bincount(chosen, minlength=counts.shape[1])

        return count

    hooks = [gate.register_forward_hook(counter(i)) for i, gate in enumerate(gates)]
    out: Loads = {}
    for name, each in batches.items():
        counts.zero_()
        for batch in each:
            real = batch.tokens.flatten() != model.config.pad_token_id
            model.model(
                input_ids=batch.tokens.to(model.device),
                position_ids=batch.positions.to(model.device),
                use_cache=False,
            )
        out[name] = counts.double() / counts.sum(1, keepdim=True)
    for hook in hooks:
        hook.remove()
    return out


def hot_experts(load: torch.Tensor) -> list[frozenset[int]]:
    """The most loaded quarter of each layer's experts, for a load [layers, experts]."""
    count = max(1, load.shape[1] // HOT_ONE_IN)
    return [frozenset(row.topk(count).indices.tolist()) for row in load]


def hot_load(load: torch.Tensor) -> list[float]:
    """The fraction of each layer's tokens that go to its hot experts; 1 / HOT_ONE_IN if the load is even."""
    return [float(row[sorted(hot)].sum()) for row, hot in zip(load, hot_experts(load), strict=True)]


def overlap(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """The fraction of each layer's hot experts that two loads have in common; 1 / HOT_ONE_IN by chance."""
    pairs = zip(hot_experts(a), hot_experts(b), strict=True)
    return [len(one & other) / len(one) for one, other in pairs]


def draw_routing(by_domain: Loads, path: Path) -> None:
    """Draws heat maps into a PNG: each domain's loads by layer and expert, and the overlap of each two domains.

    Args:
        by_domain: loads of two domains or more.
        path: the PNG file.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(by_domain)
    layers, experts = next(iter(by_domain.values())).shape
    figure, axes = plt.subplots(len(names) + 1, 1, figsize=(9, 1.6 * (len(names) + 1)), layout="constrained")
    top = max(float(load.max()) for load in by_domain.values()) * experts
    for axis, name in zip(axes, names, strict=False):
        image = axis.imshow(
            (by_domain[name] * experts).numpy(), aspect="auto", vmin=0, vmax=top, cmap="magma"
        )
        axis.set(title=f"{name}: load of each expert, 1 = even", ylabel="layer", yticks=range(layers))
    figure.colorbar(image, ax=list(axes[:-1]))
    overlaps = [(f"{a} / {b}", overlap(by_domain[a], by_domain[b])) for a, b in combinations(names, 2)]
    _draw_overlaps(figure, axes[-1], overlaps)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_overlaps(figure: Any, axis: Any, rows: list[tuple[str, list[float]]]) -> None:
    image = axis.imshow([values for _, values in rows], aspect="auto", vmin=0, vmax=1, cmap="viridis")
    axis.set(title="fraction of hot experts in common, by layer", xlabel="layer")
    axis.set(yticks=range(len(rows)), xticks=range(len(rows[0][1])))
    axis.set_yticklabels([label for label, _ in rows])
    figure.colorbar(image, ax=axis)
