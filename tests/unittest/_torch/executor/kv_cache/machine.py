# SPDX-License-Identifier: Apache-2.0
"""A seeded machine that does to a manager whatever a loop may do, and checks it against literal requests.

python -m tests.unittest._torch.executor.kv_cache.machine --steps 1000000 --seed 0

After every step: conservation and one owner per slot (`check_integrity`); for the requests the step touched,
and now and then for all: pool state plus accepted drafts, conv window and attention tokens equal the literal
request's, bit for bit. A failure names seed and step.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import MambaStateSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.requests import DummyRequest
from tensorrt_llm.runtime.kv_cache_manager_v2 import GPU_LEVEL, CacheLevel, OutOfPagesError
from tensorrt_llm.runtime.kv_cache_manager_v2.storage_resize import set_num_slots
from tests.unittest._torch.executor.kv_cache.helpers import (
    MIB,
    Batch,
    Metadata,
    Request,
    make_manager,
    settings,
    slot_of,
)
from tests.unittest._torch.executor.kv_cache.toy_kda import (
    VOCAB,
    Literal,
    ToyKda,
    attention_layers,
    logical_layers,
    read_pages,
    write_pages,
)

SCHEMES = ("records", "replay", "intermediate")
CHUNK_TOKENS = 4
MAX_TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """What is varied between machines.

    `reuse` shares prompts and keeps snapshots of them. `conv_dtype` is the extended windows' element type;
    with bfloat16 the model's projections are bfloat16 numbers.
    """

    scheme: str = "records"
    host_acceptance: bool = True
    reuse: bool = False
    batch: int = 3
    num_spec: int = 3
    host_tier: bool = True
    conv_dtype: torch.dtype = torch.float32
    check_all_every: int = 20
    device: str = "cpu"


@dataclass(eq=False)
class Live:
    """An open request: what the manager sees of it, and what it must be worth."""

    req: Request
    literal: Literal
    in_context: bool = True
    is_suspended: bool = False
    golden: int = 0
    drafts: list[int] = field(default_factory=list)


class Machine:
    """One manager under attack. `step()` does one random thing and checks what it led to."""

    def __init__(self, seed: int, options: MachineOptions) -> None:
        self.rng = random.Random(seed)
        self.options = options
        self.toy = ToyKda(num_layers=2, H=1, K=32, device=options.device)
        self.toy.qkv = [table.to(options.conv_dtype).float() for table in self.toy.qkv]
        self.manager = self._make_manager()
        self.live: dict[int, Live] = {}
        self.dummies: dict[int, DummyRequest] = {}
        self.next_id = 0
        self.num_steps = 0
        self.done: dict[str, int] = {}
        self._fails_next = False
        self._inject_failures()
        self.prompts = [[self.rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]

    def _make_manager(self) -> MambaHybridCacheManagerV2:
        options = self.options
        config = settings(
            max_gpu_total_bytes=9 * MIB,
            host_cache_size=MIB if options.host_tier else 0,
            enable_block_reuse=options.reuse,
            mamba_state_config=MambaStateSettings(periodic_snapshot_interval=2 * CHUNK_TOKENS),
        )
        manager = make_manager(
            num_heads=1,
            head_dim=32,
            num_state_layers=2,
            num_spec=options.num_spec,
            batch=options.batch,
            tokens_per_block=CHUNK_TOKENS,
            latent_dim=2,
            max_seq_len=64,
            config=config,
            kda_verify_scheme=options.scheme,
            conv_dtype=options.conv_dtype,
            kda_conv_dtype=options.conv_dtype,
            decoding_type="NGram" if options.host_acceptance else "MTP",
            device=options.device,
        )
        # So few slots and pages that requests have to give way to each other, on the host as well.
        slots, pages = options.batch + 1 + 3 * options.reuse, 14
        set_num_slots(manager.impl.storage, GPU_LEVEL, [slots, pages], 0)
        if options.host_tier:
            set_num_slots(manager.impl.storage, CacheLevel(1), [slots, pages], 0)
        return manager

    def _inject_failures(self) -> None:
        storage = self.manager.impl.storage
        reserve = storage.reserve

        def failing(level: int, needed: Sequence[int], stream: int) -> list[list[int]]:
            if self._fails_next and any(needed):
                self._fails_next = False
                raise OutOfPagesError("injected")
            return reserve(level, needed, stream)

        storage.reserve = failing

    @contextmanager
    def maybe_failing(self) -> Iterator[None]:
        """Let the next allocation fail now and then."""
        self._fails_next = self.rng.random() < 0.1
        yield
        self._fails_next = False

    def step(self) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (3, self.admit),
            (10, self.run_batch),
            (2, self.suspend),
            (2, self.resume),
            (1, self.relocate),
            (1, self.abort),
            (1, self.finish),
            (1, self.add_or_free_dummy),
            (1, self.revert),
        ]
        weights, functions = zip(*actions, strict=True)
        action = self.rng.choices(functions, weights)[0]
        with self.maybe_failing():
            action()
        self.num_steps += 1
        self.done[action.__name__] = self.done.get(action.__name__, 0) + 1
        if self.num_steps % self.options.check_all_every == 0:
            self.check_integrity()
            for live in self.live.values():
                self.check(live)

    def check_integrity(self) -> None:
        manager = self.manager
        manager.check_integrity()
        slots = [manager._slot_of(i) for i, live in self.live.items() if not live.is_suspended]
        slots += [manager._slot_of(i) for i in self.dummies]
        assert len(set(slots)) == len(slots), f"two owners: {slots}"

    # Actions

    def admit(self) -> None:
        if len(self.live) >= 2 * self.options.batch:
            return
        length = self.rng.randrange(1, 20)
        tokens = (
            self.rng.choice(self.prompts)[:length]
            if self.options.reuse
            else [self.rng.randrange(VOCAB) for _ in range(length)]
        )
        req = Request(self.next_id, list(tokens))
        self.next_id += 1
        before = self.manager.impl.num_open_caches
        if not self.manager.prepare_context(req):
            assert self.manager.impl.num_open_caches == before
            return
        live = Live(req, Literal(self.toy))
        reused = self.manager.num_reused_tokens(req.py_request_id)
        assert reused < len(tokens)
        if reused:
            self.done["reused tokens"] = self.done.get("reused tokens", 0) + reused
            live.literal.feed(tokens[:reused])
            req.context_current_position = reused
        self.live[req.py_request_id] = live

    def run_batch(self) -> None:
        """Schedule some requests, run them, accept some drafts."""
        chosen = [live for live in self.live.values() if self.rng.random() < 0.8]
        self.rng.shuffle(chosen)
        chosen = chosen[: self.options.batch]
        contexts = [live for live in chosen if live.in_context and self._place_chunk(live)]
        generations = [live for live in chosen if not live.in_context and self._place_round(live)]
        if not contexts and not generations:
            return
        dummies = [d for d in self.dummies.values() if d.is_gen][
            : self.options.batch - len(contexts + generations)
        ]
        batch = Batch([live.req for live in contexts], [*(live.req for live in generations), *dummies])
        self.manager.prepare_resources(batch)
        if generations and self.rng.random() < 0.1:
            self._try_to_suspend_too_early(generations[0])
        for live in contexts:
            self._run_chunk(live)
        self._run_rounds(generations)
        self._finish_batch(batch, contexts, generations)
        for live in (*contexts, *generations):
            self.check(live)

    def _place_chunk(self, live: Live) -> bool:
        req, manager = live.req, self.manager
        rest = req.prompt_len - req.context_current_position
        chunk = min(rest, CHUNK_TOKENS * self.rng.randrange(1, 4))
        chunk = manager.clip_context_chunk(req, chunk)
        if not manager.prepare_context(req):
            return False
        live.is_suspended = False
        if not manager.resize_context(req, chunk):
            return False
        req.context_chunk_size = chunk
        return True

    def _place_round(self, live: Live) -> bool:
        live.golden = self.rng.randrange(VOCAB)
        live.drafts = [
            self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(self.options.num_spec + 1))
        ]
        live.req.py_draft_tokens = list(live.drafts)
        live.is_suspended &= not self.manager.try_allocate_generation(live.req)
        cache = self.manager.kv_cache_map[live.req.py_request_id]
        wanted = len(live.literal.tokens) + 1 + len(live.drafts)
        return cache.is_active and cache.capacity == wanted

    def _run_chunk(self, live: Live) -> None:
        req = live.req
        start = req.context_current_position
        tokens = req.tokens[start : start + req.context_chunk_size]
        self.toy.prefill(self.manager, slot_of(self.manager, req), start, tokens)
        write_pages(self.manager, req.py_request_id, start, tokens)
        live.literal.feed(tokens)

    def _run_rounds(self, generations: Sequence[Live]) -> None:
        for _, group in groupby(
            sorted(generations, key=lambda one: len(one.drafts)), lambda one: len(one.drafts)
        ):
            members = list(group)
            slots = [slot_of(self.manager, live.req) for live in members]
            self.toy.verify(self.manager, slots, [[live.golden, *live.drafts] for live in members])
        for live in generations:
            position = len(live.literal.tokens)
            write_pages(self.manager, live.req.py_request_id, position, [live.golden, *live.drafts])

    def _finish_batch(self, batch: Batch, contexts: Sequence[Live], generations: Sequence[Live]) -> None:
        manager = self.manager
        for live in generations:
            accepted = self.rng.randrange(len(live.drafts) + 1)
            live.req.py_num_accepted_draft_tokens = accepted
            kept = [live.golden, *live.drafts[:accepted]]
            live.literal.feed(kept)
            live.req.tokens = [*live.req.tokens, *kept]
        if not self.options.host_acceptance:
            requests = [*batch.context_requests, *batch.generation_requests]
            counts = torch.tensor([1 + req.py_num_accepted_draft_tokens for req in requests])
            ids = [req.py_request_id for req in requests]
            manager.update_mamba_states(Metadata(len(contexts), ids), counts)
        manager.update_context_resources(batch)
        manager.update_resources(Batch([], [live.req for live in generations]))
        for live in contexts:
            live.req.context_current_position += live.req.context_chunk_size
            live.req.context_chunk_size = 0
            live.in_context = live.req.context_current_position < live.req.prompt_len

    def _try_to_suspend_too_early(self, live: Live) -> None:
        try:
            self.manager.suspend_request(live.req)
        except RuntimeError as error:
            assert f"request {live.req.py_request_id}" in str(error)
        else:
            raise AssertionError("a suspend before acceptance was allowed")

    def pick(self, *, suspended: bool) -> Live | None:
        found = [live for live in self.live.values() if live.is_suspended is suspended]
        return self.rng.choice(found) if found else None

    def suspend(self) -> None:
        live = self.pick(suspended=False)
        if live is not None:
            self.manager.suspend_request(live.req)
            live.is_suspended = True
            self.manager.suspend_request(live.req)

    def resume(self) -> None:
        live = self.pick(suspended=True)
        if live is not None and self.manager.resume_request(live.req):
            live.is_suspended = False

    def relocate(self) -> None:
        """Move a live state to another slot under the manager's feet, as a defragmentation would."""
        live = self.pick(suspended=False)
        manager, storage = self.manager, self.manager.impl.storage
        if live is None or not storage.group(manager._ssm_group).allocator.num_free:
            return
        needed = [0] * len(storage.levels[0])
        group = storage.layout.group_of[manager._ssm_group]
        needed[group] = 1
        self._fails_next = False
        table = manager.kv_cache_map[live.req.py_request_id]._holdings.tables[manager._ssm_group]
        slots = storage.reserve(0, needed, 0)[group]
        storage.migrate([table.pages[0]], 0, slots, 0)
        table.refresh()

    def abort(self) -> None:
        """At any point: in a prompt, between rounds, suspended."""
        if self.live and self.rng.random() < 0.5:
            self._free(self.rng.choice(list(self.live.values())))

    def finish(self) -> None:
        for live in list(self.live.values()):
            if len(live.literal.tokens) >= MAX_TOKENS:
                self._free(live)

    def _free(self, live: Live) -> None:
        self.manager.free_resources(live.req)
        self.manager.free_resources(live.req)
        del self.live[live.req.py_request_id]

    def add_or_free_dummy(self) -> None:
        if self.dummies:
            _, dummy = self.dummies.popitem()
            self.manager.free_resources(dummy)
            return
        request_id, self.next_id = self.next_id, self.next_id + 1
        before = self.manager.impl.num_open_caches
        made = self.manager.add_dummy_requests(
            [request_id], [self.rng.randrange(1, 5)], is_gen=True, max_num_draft_tokens=self.options.num_spec
        )
        if made is None:
            assert self.manager.impl.num_open_caches == before
            return
        self.dummies[request_id] = made[0]
        for state, window in logical_layers(self.manager, slot_of(self.manager, made[0])):
            assert not state.any() and not window.any()

    def revert(self) -> None:
        """Allocate and prepare a round that does not run."""
        live = self.pick(suspended=False)
        if live is None or live.in_context or not self._place_round(live):
            return
        self.manager.prepare_resources(Batch([], [live.req]))
        self.manager.revert_allocate_generation(live.req)
        self.check(live)

    # Checks

    def check(self, live: Live) -> None:
        """The request is worth what its literal counterpart is. Only where it has a slot."""
        if live.is_suspended:
            return
        request_id, manager = live.req.py_request_id, self.manager
        cache = manager.kv_cache_map[request_id]
        tokens = live.literal.tokens
        assert cache.history_length == len(tokens), f"{cache.history_length} tokens, not {len(tokens)}"
        for layer in attention_layers(manager):
            found = read_pages(manager, request_id, len(tokens), layer)
            assert found == tokens, f"request {request_id}: attention holds {found}, not {tokens}"
        if not tokens or manager._map.state_index.get(request_id) != manager._slot_of(request_id):
            return
        layers = logical_layers(manager, manager._slot_of(request_id))
        for layer, ((state, window), (true_state, true_window)) in enumerate(
            zip(layers, live.literal.layers, strict=True)
        ):
            assert self._equal(state, true_state), f"request {request_id}, layer {layer}: another state"
            assert torch.equal(window, true_window), f"request {request_id}, layer {layer}: another window"

    def _equal(self, state: torch.Tensor, true_state: torch.Tensor) -> bool:
        # A GPU's sums depend on how many requests share a launch; a state of another request is off by O(1).
        if self.options.device == "cuda":
            return torch.allclose(state, true_state, rtol=1e-4, atol=1e-4)
        return torch.equal(state, true_state)

    def close(self) -> None:
        """Everything returns after the last request."""
        for live in list(self.live.values()):
            self._free(live)
        for dummy in self.dummies.values():
            self.manager.free_resources(dummy)
        self.manager.check_integrity()
        storage = self.manager.impl.storage
        for level in range(len(storage.levels)):
            for statistics in storage.statistics(level):
                assert statistics.available == statistics.total, f"level {level}: {statistics}"
        self.manager.shutdown()


def run(seed: int, num_steps: int, options: MachineOptions) -> dict[str, int]:
    """Run a machine; an AssertionError names seed and step. Returns how often each action ran."""
    machine = Machine(seed, options)
    for step in range(num_steps):
        try:
            machine.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {step}, {options}: {error!r}") from error
    machine.close()
    return machine.done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = [
        MachineOptions(scheme=scheme, host_acceptance=host, reuse=reuse, conv_dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for scheme in SCHEMES
        for host in (True, False)
        for reuse in ((False,) if scheme == "records" else (False, True))
    ]
    per_run, started, total = 2_000, time.monotonic(), 0
    seed = args.seed
    while total < args.steps:
        run(seed, per_run, variants[seed % len(variants)])
        seed, total = seed + 1, total + per_run
        if seed % 10 == 0:
            print(
                f"{total} steps, seeds {args.seed}..{seed - 1}, {time.monotonic() - started:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
