# SPDX-License-Identifier: Apache-2.0
"""Times `trtllm-serve` on a CPU: python -m benchmarks.serve_cpu --out benchmarks/results/serve_cpu.json

Method. One server per arm, all running at once and idle but for the one that is asked; every prompt goes to
all arms in turn, in an order that rotates, so that what the machine does beside hits all alike.
Requests are greedy and streamed over HTTP; a rate is generated tokens over the time from sending the request
to the end of the stream, prompt included. Every text must be the same in all arms, else no figure is printed.

Arms. `off`: no speculation. `records`, `replay`, `intermediate`: n-gram drafts, and the three ways to undo
the rejected ones. Accepted drafts are counted without the golden token, over the rounds that had drafts.
Bytes per slot are those beside the recurrent state: records, replay caches or states of the drafts, and the
wider convolution caches.

Texts. `structured`: a class with ten similar methods, to be continued. `held_out`: prompts drawn by seed from
standard-library files that the packaged model was not trained on.
"""

import argparse
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from examples.train_tiny.corpus import held_out_files

SCHEMES = ("records", "replay", "intermediate")
ARMS = ("off", *SCHEMES)
READY_WITHIN_S = 60
POLL_S = 0.02
REQUEST_TIMEOUT_S = 300
PROMPT_CHARACTERS = (300, 1500)
NUM_STREAMS = 8
METHOD = '''
    def get_{name}(self):
        """Return the {name} of the record."""
        if self._{name} is None:
            raise ValueError("{name} is not set")
        return self._{name}
'''
METHOD_NAMES = (
    "title",
    "author",
    "year",
    "language",
    "publisher",
    "price",
    "weight",
    "height",
    "width",
    "depth",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request: its text, tokens and seconds, and what its verify rounds did."""

    text: str
    num_tokens: int
    seconds: float
    num_drafted_rounds: int
    num_drafts: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(slots=True, kw_only=True)
class Server:
    """A server process of one arm."""

    arm: str
    process: subprocess.Popen[bytes]
    client: httpx.Client
    ready_s: float
    info: dict[str, Any]
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        """Stream a greedy completion that ignores the end token."""
        self._drain_stats()
        body = {
            "model": self.info["served"], "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        text: list[str] = []
        usage: dict[str, int] = {}
        started = time.perf_counter()
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"the server answered {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    text += [choice["text"] for choice in chunk["choices"]]
                    usage = chunk.get("usage", usage)
        seconds = time.perf_counter() - started
        spec = [stats.get("specDecodingStats", {}) for stats in self._drain_stats()]
        return Answer(
            text="".join(text),
            num_tokens=usage["completion_tokens"],
            seconds=seconds,
            num_drafted_rounds=sum(step.get("numRequestsWithDraftTokens", 0) for step in spec),
            num_drafts=sum(step.get("numDraftTokens", 0) for step in spec),
            num_accepted=sum(step.get("numAcceptedTokens", 0) for step in spec),
        )

    def _drain_stats(self) -> list[dict[str, Any]]:
        stats: list[dict[str, Any]] = self.client.get("/metrics").json()
        return stats

    def peak_memory_bytes(self) -> int:
        """The most memory that was resident so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        assert found, "Linux reports VmHWM"
        return int(found.group(1)) << 10


@contextmanager
def start_server(arm: str, options: argparse.Namespace, folder: Path) -> Iterator[Server]:
    """A server of the arm that answers /health; its log is in `folder`."""
    config = folder / f"{arm}.yaml"
    config.write_text(json.dumps(_llm_options(arm, options)))
    log = folder / f"{arm}.log"
    command = [sys.executable, "-m", "tensorrt_llm.commands.serve", options.model, "--port", "0"]
    flags = ["--host", "127.0.0.1", "--device", "cpu", "--config", str(config)]
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *flags], stderr=output, stdout=output)
    try:
        url = _wait_for_url(process, log, started)
        ready_s = time.perf_counter() - started
        with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
            info = client.get("/server_info").json()
            info["served"] = client.get("/v1/models").json()["data"][0]["id"]
            yield Server(arm=arm, process=process, client=client, ready_s=ready_s, info=info)
    finally:
        process.kill()
        process.wait()


def _llm_options(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    limits = {"max_batch_size": options.max_batch_size, "max_seq_len": options.max_seq_len}
    if arm == "off":
        return limits
    ngram = {"decoding_type": "NGram", "max_draft_len": options.max_draft_len}
    return {**limits, "speculative_config": ngram, "model_kwargs": {"kda_verify_scheme": arm}}


def _wait_for_url(process: subprocess.Popen[bytes], log: Path, started: float) -> str:
    """The URL once the server has said that it serves and /health agrees."""
    while time.perf_counter() - started < READY_WITHIN_S and process.poll() is None:
        found = re.search(r"(http://\S+) serves ", log.read_text())
        if found and httpx.get(f"{found.group(1)}/health").status_code == 200:
            return found.group(1)
        time.sleep(POLL_S)
    raise RuntimeError(f"the server did not come up within {READY_WITHIN_S} s; its log:\n{log.read_text()}")


def structured_prompt() -> str:
    """A class with ten similar methods."""
    head = 'class Record:\n    """A record of a library."""\n'
    return head + "".join(METHOD.format(name=name) for name in METHOD_NAMES) + "\n    def get_"


def held_out_prompts(count: int, seed: int) -> list[str]:
    """Texts that end with a line of a held-out file, the file drawn in proportion to its size."""
    rng = random.Random(seed)
    files = [file.text for file in held_out_files() if len(file.text) > PROMPT_CHARACTERS[1] * 2]
    prompts = []
    for text in rng.choices(files, weights=[len(text) for text in files], k=count):
        length = rng.randint(*PROMPT_CHARACTERS)
        end = text.index("\n", rng.randrange(length, len(text) - length)) + 1
        prompts.append(text[end - length : end])
    return prompts


def ask_all(servers: Sequence[Server], kind: str, prompts: Sequence[str], max_tokens: int) -> None:
    """Every prompt to every server in turn. Raises RuntimeError where their texts differ."""
    for number, prompt in enumerate(prompts):
        shift = number % len(servers)
        answers = {}
        for server in [*servers[shift:], *servers[:shift]]:
            answers[server.arm] = server.ask(prompt, max_tokens)
            server.answers.setdefault(kind, []).append(answers[server.arm])
        if len({answer.text for answer in answers.values()}) != 1:
            raise RuntimeError(f"texts differ between arms: {answers}")
        print(f"{kind}: {number + 1} of {len(prompts)}", end="\r", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def many_streams(server: Server, prompt: str, max_tokens: int) -> float:
    """Tokens per second of `NUM_STREAMS` requests at once."""
    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(lambda _: server.ask(prompt, max_tokens), range(NUM_STREAMS)))
    return sum(answer.num_tokens for answer in answers) / (time.perf_counter() - started)


def summarise(server: Server, off: Server, streams_tokens_per_s: float) -> dict[str, Any]:
    """One arm's row."""
    info, answers = server.info, server.answers
    side_bytes = info["records_bytes"] + info["other_side_bytes"]
    every = [answer for of_kind in answers.values() for answer in of_kind]
    rounds = sum(answer.num_drafted_rounds for answer in every)
    accepted = sum(answer.num_accepted for answer in every)
    return {
        "arm": server.arm,
        "tokens_per_s": {kind: median_rate(answers[kind]) for kind in answers},
        "tokens_per_s_of_streams": streams_tokens_per_s,
        "ratio_to_off": {kind: mean_ratio(answers[kind], off.answers[kind]) for kind in answers},
        "accepted_drafts_per_round": accepted / rounds if rounds else 0.0,
        "accepted_drafts_per_round_of": {kind: _accepted_per_round(answers[kind]) for kind in answers},
        "record_bytes_per_slot": info["records_bytes"] // info["ssm_slots"],
        "side_bytes_per_slot": side_bytes // info["ssm_slots"],
        "ready_s": server.ready_s,
        "resident_bytes": server.peak_memory_bytes(),
    }


def median_rate(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.tokens_per_s for answer in answers)


def mean_ratio(answers: Sequence[Answer], base: Sequence[Answer]) -> float:
    """Geometric mean over prompts of how much faster `answers` came than `base`."""
    logs = [math.log(a.tokens_per_s / b.tokens_per_s) for a, b in zip(answers, base, strict=True)]
    return math.exp(statistics.fmean(logs))


def _accepted_per_round(answers: Sequence[Answer]) -> float:
    rounds = sum(answer.num_drafted_rounds for answer in answers)
    return sum(answer.num_accepted for answer in answers) / rounds if rounds else 0.0


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "arm": lambda row: row["arm"],
        "held-out tok/s": lambda row: f"{row['tokens_per_s']['held_out']:.1f}",
        "x off": lambda row: f"{row['ratio_to_off']['held_out']:.3f}",
        "structured tok/s": lambda row: f"{row['tokens_per_s']['structured']:.1f}",
        "x off ": lambda row: f"{row['ratio_to_off']['structured']:.2f}",
        f"{NUM_STREAMS} streams tok/s": lambda row: f"{row['tokens_per_s_of_streams']:.1f}",
        "accepted/round": lambda row: f"{row['accepted_drafts_per_round']:.2f}",
        "bytes/slot": lambda row: f"{row['side_bytes_per_slot']:,}",
        "ready s": lambda row: f"{row['ready_s']:.1f}",
        "resident MiB": lambda row: f"{row['resident_bytes'] / 2**20:.0f}",
    }
    print("  ".join(f"{name:>12}" for name in columns))
    for row in rows:
        print("  ".join(f"{cell(row):>{max(12, len(name))}}" for name, cell in columns.items()))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="kimi-k3-tiny")
    parser.add_argument("--prompts", type=int, default=50, help="held-out prompts")
    parser.add_argument("--structured", type=int, default=5, help="times that the structured prompt is asked")
    parser.add_argument("--max_tokens", type=int, default=128, help="generated per request")
    parser.add_argument("--max_draft_len", type=int, default=7)
    parser.add_argument("--max_batch_size", type=int, default=8)
    parser.add_argument("--max_seq_len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(start_server(arm, options, folder)) for arm in ARMS]
        prompt = structured_prompt()
        ask_all(servers, "warm_up", [prompt], options.max_tokens)
        for server in servers:
            server.answers.clear()
        ask_all(servers, "structured", [prompt] * options.structured, options.max_tokens)
        ask_all(servers, "held_out", held_out_prompts(options.prompts, options.seed), options.max_tokens)
        rates = [many_streams(server, prompt, options.max_tokens) for server in servers]
        rows = [summarise(server, servers[0], rate) for server, rate in zip(servers, rates, strict=True)]
    print_table(rows)
    report = {"machine": machine(), "options": vars(options) | {"out": None}, "arms": rows}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
