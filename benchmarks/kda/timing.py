# SPDX-License-Identifier: Apache-2.0
"""Graphs of calls, replayed in turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

TURNS = 20
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """us per call: the median over turns, and the distance between the quartiles."""

    us: float
    spread: float


class Timer(Protocol):
    """Makes something of an arm's calls that can be run as a whole, and times such things in turn."""

    def prepare(self, calls: Sequence[Call], captured: bool = True) -> Any: ...

    def time(self, prepared: dict[str, Any], calls: int) -> dict[str, Figure]:
        """Figures per call, of which each prepared thing makes so many."""
        ...


@dataclass(frozen=True, slots=True)
class Launches:
    """Calls that are made one by one, as a graph that was not captured."""

    calls: Sequence[Call]

    def replay(self) -> None:
        for call in self.calls:
            call()


class GraphTimer:
    """CUDA graphs."""

    def prepare(self, calls: Sequence[Call], captured: bool = True) -> torch.cuda.CUDAGraph | Launches:
        """A graph of the calls in order, or the calls; they have all run once before."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        if not captured:
            return Launches(calls)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
        finally:
            # A capture that fails leaves its own stream the current one.
            torch.cuda.set_stream(stream)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def time(self, prepared: dict[str, Any], calls: int) -> dict[str, Figure]:
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in prepared}
        for _ in range(TURNS):
            for name, graph in prepared.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        figures = {}
        for name, pairs in events.items():
            times = [1e3 * start.elapsed_time(end) / calls for start, end in pairs]
            low, median, high = statistics.quantiles(times, n=4)
            figures[name] = Figure(median, high - low)
        return figures


class DryTimer:
    """Runs every call once, on any device: the way is tried, the figures mean nothing."""

    def prepare(self, calls: Sequence[Call], captured: bool = True) -> Sequence[Call]:
        return calls

    def time(self, prepared: dict[str, Any], calls: int) -> dict[str, Figure]:
        figures = {}
        for name, sequence in prepared.items():
            start = time.perf_counter()
            for call in sequence:
                call()
            figures[name] = Figure(1e6 * (time.perf_counter() - start) / calls, 0.0)
        return figures
