"""Prometheus metrics: gauges and counters read from the engines at scrape, histograms fed as things happen.

Names and bucket edges are vLLM's, under our prefix, so that dashboards can be moved over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import attrs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trio_llm.engine.embedding import Embedder
from trio_llm.engine.engine import Engine
from trio_llm.engine.registry import Registry

PREFIX = "trio_llm_"
_LABEL = "model_name"

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class _Latencies:
    """A histogram of seconds.  Every token is observed, and prometheus_client's takes longer over it than its decoding."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Put the counts, each with those below it, into what is scraped."""
        edges = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, [*zip(edges, accumulate(self._counts), strict=True)], self._sum)


@attrs.frozen(eq=False)
class _Observer:
    """Feeds one engine's events into its histograms."""

    to_first: _Latencies = attrs.field(factory=lambda: _Latencies(_FIRST_TOKEN_BUCKETS))
    between: _Latencies = attrs.field(factory=lambda: _Latencies(_INTER_TOKEN_BUCKETS))

    def first_token(self, seconds: float) -> None:
        self.to_first.observe(seconds)

    def inter_token(self, seconds: float, count: int) -> None:
        self.between.observe(seconds, count)

    def finished(self, reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Counted by the engine itself."""


class Metrics(Collector):
    """The metrics of one application, in a Prometheus registry of their own.

    Args:
        registry: the engines.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._observers: dict[str, _Observer] = {}
        """By the name of the engine."""
        self._observed: set[int] = set()
        self._prometheus = CollectorRegistry()
        self._prometheus.register(self)

    def observe(self, engine: Engine | Embedder) -> None:
        """Feed the histograms from an engine; idempotent."""
        if id(engine) not in self._observed:
            self._observed.add(id(engine))
            engine.observers.append(self._observers.setdefault(self._name(engine), _Observer()))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        for engine in self._registry.engines():
            self.observe(engine)
        return generate_latest(self._prometheus)

    def _name(self, engine: Engine | Embedder) -> str:
        return next((name for name, served in self._registry.items() if served is engine), engine.name)

    def describe(self) -> Iterable[Metric]:
        """Nothing: what is collected depends on the engines there are."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters, read from the engines now."""
        running = GaugeMetricFamily(PREFIX + "num_requests_running", "Sequences in the batch.", labels=[_LABEL])
        waiting = GaugeMetricFamily(PREFIX + "num_requests_waiting", "Sequences that wait.", labels=[_LABEL])
        usage = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "KV blocks in use, 0 to 1.", labels=[_LABEL])
        preemptions = CounterMetricFamily(PREFIX + "num_preemptions", "Preemptions.", labels=[_LABEL])
        queries = CounterMetricFamily(
            PREFIX + "prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", labels=[_LABEL]
        )
        hits = CounterMetricFamily(
            PREFIX + "prefix_cache_hits", "Prompt tokens found in the prefix cache.", labels=[_LABEL]
        )
        drafts = CounterMetricFamily(PREFIX + "spec_decode_num_drafts", "Rows that carried drafts.", labels=[_LABEL])
        drafted = CounterMetricFamily(PREFIX + "spec_decode_num_draft_tokens", "Tokens drafted.", labels=[_LABEL])
        agreed = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens", "Drafted tokens that were right.", labels=[_LABEL]
        )
        prompt = CounterMetricFamily(PREFIX + "prompt_tokens", "Prompt tokens.", labels=[_LABEL])
        generation = CounterMetricFamily(PREFIX + "generation_tokens", "Tokens generated.", labels=[_LABEL])
        wasted = CounterMetricFamily(
            PREFIX + "wasted_tokens", "Tokens computed beyond the end of their choice.", labels=[_LABEL]
        )
        success = CounterMetricFamily(
            PREFIX + "request_success", "Requests that ended, by how.", labels=[_LABEL, "finished_reason"]
        )
        for engine in self._registry.engines():
            labels = [self._name(engine)]
            statistics = engine.statistics()
            core = statistics.core
            running.add_metric(labels, core.num_running)
            waiting.add_metric(labels, statistics.num_waiting)
            usage.add_metric(labels, core.kv_cache_usage)
            preemptions.add_metric(labels, core.num_preemptions)
            queries.add_metric(labels, core.num_cache_queries)
            hits.add_metric(labels, core.num_cache_hits)
            drafts.add_metric(labels, core.num_drafts)
            drafted.add_metric(labels, core.num_draft_tokens)
            agreed.add_metric(labels, core.num_accepted_tokens)
            prompt.add_metric(labels, statistics.prompt_tokens)
            generation.add_metric(labels, statistics.generation_tokens)
            wasted.add_metric(labels, statistics.wasted_tokens)
            for reason, count in statistics.finished.items():
                success.add_metric([*labels, reason], count)
        yield from (running, waiting, usage, preemptions, queries, hits, drafts, drafted, agreed)
        yield from (prompt, generation, wasted, success)
        to_first = HistogramMetricFamily(
            PREFIX + "time_to_first_token_seconds",
            "Seconds from a request's admission to its first token.",
            labels=[_LABEL],
        )
        between = HistogramMetricFamily(
            PREFIX + "inter_token_latency_seconds",
            "Seconds between the tokens of a choice, the mean of those that came together.",
            labels=[_LABEL],
        )
        for name, observer in self._observers.items():
            observer.to_first.add_to(to_first, [name])
            observer.between.add_to(between, [name])
        yield from (to_first, between)
