"""Figures for Prometheus: vLLM's names, and edgemoe's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from edgemoe.api.model import Model
    from edgemoe.api.status import Status
    from edgemoe.engine.generate import Answer
    from edgemoe.kv.prefix_cache import PrefixCacheCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKENS = tuple(1 << i for i in range(18))

_TIMES = {
    "time_to_first_token": "Time to the first token.",
    "inter_token_latency": "Mean time of a later token of an answer.",
    "e2e_request_latency": "Time from a request's arrival to its last token.",
    "request_queue_time": "Time until a request got its KV.",
    "request_prefill_time": "Time from then to the first token.",
    "request_decode_time": "Time from the first token to the last.",
}


class Metrics:
    """Counts the costs of answers, and reads the state of open models. For the event loop's thread.

    The name of a model is the label model_name of its figures.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series of each figure, which nothing reads
        self._registry = CollectorRegistry()
        label, registry = ["model_name"], self._registry
        self._times = {
            name: Histogram(f"vllm:{name}_seconds", text, label, registry=registry, buckets=_SECONDS)
            for name, text in _TIMES.items()
        }
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts.", label, registry=registry)
        self._new = Counter("vllm:generation_tokens", "Tokens of answers.", label, registry=registry)
        text = "Tokens of prompts looked for among kept ones."
        self._queries = Counter("vllm:prefix_cache_queries", text, label, registry=registry)
        self._hits = Counter(
            "vllm:prefix_cache_hits", "Of these, tokens that were kept.", label, registry=registry
        )
        self._ended = Counter(
            "vllm:request_success", "Answers by their end.", [*label, "finished_reason"], registry=registry
        )
        self._failed = Counter(
            "edgemoe:request_failures",
            "Requests by the error's status.",
            [*label, "status"],
            registry=registry,
        )
        text = "Times that the model was loaded."
        self._loadings = Counter("edgemoe:model_loadings", text, label, registry=registry)
        self._lengths = {
            kind: Histogram(
                f"vllm:request_{kind}_tokens",
                f"Tokens of a {kind}.",
                label,
                registry=registry,
                buckets=_TOKENS,
            )
            for kind in ("prompt", "generation")
        }
        self._live = _Live()
        registry.register(self._live)

    def watch(self, name: str, model: Model | None) -> None:
        """Adds the figures of a model that has been loaded; None: removes the figures of one that is closed."""
        if model is not None:
            self._loadings.labels(name).inc()
        self._live.watch(name, model)

    def answered(self, model: str, answer: Answer) -> None:
        """Counts an answer of a model."""
        self._ended.labels(model, answer.finish_reason).inc()
        self._prompt.labels(model).inc(answer.prompt_tokens)
        self._new.labels(model).inc(answer.new_tokens)
        self._queries.labels(model).inc(answer.prompt_tokens)
        self._hits.labels(model).inc(answer.cached_tokens)
        self._lengths["prompt"].labels(model).observe(answer.prompt_tokens)
        self._lengths["generation"].labels(model).observe(answer.new_tokens)
        decode = answer.total_s - answer.ttft_s
        seconds = {
            "time_to_first_token": answer.ttft_s,
            "inter_token_latency": answer.tpot_s,
            "e2e_request_latency": answer.total_s,
            "request_queue_time": answer.queue_s,
            "request_prefill_time": answer.ttft_s - answer.queue_s,
            "request_decode_time": decode,
        }
        for name, value in seconds.items():
            if value is not None:
                self._times[name].labels(model).observe(value)

    def failed(self, model: str, status: int) -> None:
        """Counts a request for a model that an error has ended."""
        self._failed.labels(model, str(status)).inc()

    def text(self) -> bytes:
        """Every figure, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Live(Collector):
    """Figures of open models, which are read when they are wanted."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def watch(self, name: str, model: Model | None) -> None:
        """Adds a model, or removes it."""
        self._models.pop(name, None)
        if model is not None:
            self._models[name] = model

    def collect(self) -> Iterator[Metric]:
        """Yields every figure once, with the samples of all open models; none before a model is open."""
        figures = dict[str, Metric]()
        for name, model in list(self._models.items()):
            for figure in _Figures(name).of(model.status()):
                known = figures.setdefault(figure.name, figure)
                if known is not figure:
                    known.samples += figure.samples
        yield from figures.values()


class _Figures:
    """The figures of one open model.

    Args:
        name: the name of the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def of(self, status: Status) -> Iterator[Metric]:
        """Yields every figure of a model's state."""
        yield from self._gauges(status)
        yield from self._counters(status)
        if status.disk:
            yield from self._disk(status.disk)

    def _gauges(self, status: Status) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", status.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", status.waiting)
        share = status.memory["kv"] / status.kv_limit_bytes if status.kv_limit_bytes else 0
        yield self._gauge("vllm:kv_cache_usage_perc", "Reserved fraction of the planned KV.", share)
        yield self._gauge("edgemoe:memory_limit_bytes", "The limit.", status.limit_bytes)
        yield self._gauge("edgemoe:memory_peak_bytes", "The most that was taken.", status.peak_bytes)
        yield self._family(GaugeMetricFamily, "edgemoe:memory_bytes", "Reserved.", "part", status.memory)
        resident = {(tier, str(level)): n for tier, of in status.resident.items() for level, n in of.items()}
        family = GaugeMetricFamily(
            "edgemoe:experts_resident", "Experts in memory.", labels=["model_name", "tier", "level"]
        )
        for (tier, level), number in resident.items():
            family.add_metric([self._name, tier, level], number)
        yield family

    def _counters(self, status: Status) -> Iterator[Metric]:
        moved, counter = status.moved, CounterMetricFamily
        computed = {str(level): n for level, n in status.use.experts.items()}
        wanted = {str(level): n for level, n in moved.levels.items()}
        hits = {"vram": moved.vram_hits, "dram": moved.dram_hits}
        read = {"ssd": moved.ssd_bytes, "dram": moved.dram_bytes}
        yield self._family(counter, "edgemoe:expert_requests", "Experts that steps wanted.", "level", wanted)
        yield self._family(counter, "edgemoe:expert_hits", "Of these, experts in memory.", "tier", hits)
        yield self._family(counter, "edgemoe:experts_computed", "Experts computed.", "level", computed)
        yield self._family(counter, "edgemoe:expert_bytes_read", "Bytes moved up.", "tier", read)
        agreed = status.use.agreement
        yield self._family(counter, "edgemoe:lynx_experts", "Experts of steps with --lynx.", "count", agreed)
        yield self._family(counter, "edgemoe:drafts", "Tokens guessed with --draft.", "count", status.drafts)
        factors = status.use.compensation
        yield self._family(
            counter, "edgemoe:compensated", "Experts computed with --compensate.", "count", factors
        )
        family = counter("edgemoe:compensator_bytes", "Bytes read for these.", labels=["model_name"])
        family.add_metric([self._name], moved.compensator_bytes)
        yield family
        moves = moved.transitions
        size = moves.pop("moved_bytes")
        yield self._family(counter, "edgemoe:expert_transitions", "Of --policy hotness.", "kind", moves)
        ahead = {"useful": moved.hidden_bytes, "wasted": moved.wasted_bytes}
        for kind, number in ahead.items():
            family = counter(
                f"edgemoe:prefetch_{kind}_bytes", f"Bytes read ahead, {kind}.", labels=["model_name"]
            )
            family.add_metric([self._name], number)
            yield family
        family = counter("edgemoe:transition_bytes", "Bytes that these moved.", labels=["model_name"])
        family.add_metric([self._name], size)
        yield family

    def _disk(self, disk: PrefixCacheCounts) -> Iterator[Metric]:
        """The prefix cache's figures; without one there are none."""
        yield self._gauge("edgemoe:prefix_cache_disk_bytes", "Of KV on disk.", disk.used_bytes)
        yield self._gauge("edgemoe:prefix_cache_disk_limit_bytes", "Its limit.", disk.limit_bytes)
        counter, label = CounterMetricFamily, "kind"
        hits = counter("edgemoe:prefix_cache_disk_hits", "Tokens whose KV was read.", labels=["model_name"])
        hits.add_metric([self._name], disk.tokens_read)
        yield hits
        moved = {"read": disk.bytes_read, "written": disk.bytes_written}
        yield self._family(counter, "edgemoe:prefix_cache_moved_bytes", "From and to disk.", label, moved)
        ended = {"evicted": disk.evicted, "dropped": disk.dropped, "failed": disk.failures}
        blocks = {"read": disk.blocks_read, "written": disk.blocks_written, **ended}
        yield self._family(counter, "edgemoe:prefix_cache_blocks", "Files of KV.", label, blocks)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._name], value)
        return family

    def _family(self, kind: type, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family: Metric = kind(name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._name, key], value)  # type: ignore[attr-defined]
        return family
