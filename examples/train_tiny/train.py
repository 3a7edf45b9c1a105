# SPDX-License-Identifier: Apache-2.0
"""Train kimi-k3-tiny with the project's own modules.

python examples/train_tiny/prepare.py --out data
python examples/train_tiny/train.py --data data --out run --minutes 8.5        (one H200; --device cpu works,
slowly)

A step's forward, backward and update are one CUDA graph on a GPU. The learning rate falls to zero over the
run, whose length in steps follows from the first steps' speed (or --steps); `training.json` records both.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from plot import write_loss_svg
from torch.nn import functional as F

from tensorrt_llm._torch.models.checkpoint import save_weights
from tensorrt_llm._torch.models.config import load_config
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tensorrt_llm._torch.modules.attn_res import AttentionResidual
from tensorrt_llm._torch.modules.kda.attention import KimiDeltaAttention
from tensorrt_llm._torch.modules.moe import LatentMoE

CONFIG_FOLDER = Path(__file__).parents[2] / "tensorrt_llm" / "assets" / "kimi-k3-tiny"
PEAK_RATE, WARMUP_STEPS, WEIGHT_DECAY, CLIP = 3e-3, 100, 0.1, 1.0
BALANCE_RATE = 1e-3
LIBRARY_SHARE = 0.4
"""Share of crops from the standard library, whose held-out files are the yardstick."""


def initialize(model: KimiForCausalLM) -> None:
    """Weights normal with std 1 / sqrt(in); outputs of blocks smaller by depth; slow decays to begin with."""
    depth = (2 * model.config.num_layers) ** -0.5
    for name, p in model.named_parameters():
        if p.ndim >= 2 and not name.endswith(("res.proj", ".conv")):
            scale = depth if name.endswith(("o_proj", "down", "from_latent")) else 1.0
            torch.nn.init.normal_(p, std=scale * p.shape[-1] ** -0.5)
    torch.nn.init.normal_(model.model.embed_tokens, std=0.5)
    torch.nn.init.normal_(model.lm_head, std=0.02)
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            torch.nn.init.uniform_(module.conv, -0.5, 0.5)
            torch.nn.init.uniform_(module.dt_bias, -7.0, -1.5)
        elif isinstance(module, AttentionResidual):
            torch.nn.init.zeros_(module.proj)


def crops(streams: dict[str, torch.Tensor], batch: int, length: int, gen: torch.Generator) -> torch.Tensor:
    """batch random crops [batch, length + 1] of the training streams, int64."""
    num_library = round(batch * LIBRARY_SHARE)
    rows = []
    for name, count in (("library", num_library), ("packages", batch - num_library)):
        stream = streams[name]
        starts = torch.randint(len(stream) - length - 1, (count, 1), generator=gen).to(stream.device)
        rows.append(stream[starts + torch.arange(length + 1, device=stream.device)])
    return torch.cat(rows).long()


class Trainer:
    """One training step on a fixed batch buffer; `run` does it, by graph replay on a GPU."""

    def __init__(self, model: KimiForCausalLM, batch: int, length: int):
        device = model.lm_head.device
        self.model = model
        self.on_gpu = device.type == "cuda"
        self.tokens = torch.zeros(batch, length + 1, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        plain = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
        rate = torch.tensor(0.0, device=device)
        self.optimizer = torch.optim.AdamW(
            groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=self.on_gpu
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)

    def _step(self) -> None:
        with torch.autocast(self.tokens.device.type, dtype=torch.bfloat16, enabled=self.on_gpu):
            logits = self.model.training_logits(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=not self.on_gpu or self.graph is None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self.optimizer.step()
        self._balance()
        self.loss.copy_(loss.detach())

    @torch.no_grad()
    def _balance(self) -> None:
        """Move each expert's selection bias against its load; the bias never enters the weights."""
        for module in self.model.modules():
            if isinstance(module, LatentMoE):
                load = module.expert_load
                module.selection_bias.add_(BALANCE_RATE * torch.sign(load.mean() - load))
                load.zero_()

    def capture(self) -> None:
        """Warm up three steps beside the main stream and record the next; the batch buffer must be filled."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = graph

    def run(self, tokens: torch.Tensor) -> None:
        self.tokens.copy_(tokens)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then linear to zero."""
    return PEAK_RATE * min((step + 1) / WARMUP_STEPS, max(0.0, (steps - step) / max(1, steps - WARMUP_STEPS)))


@torch.no_grad()
def held_out_loss(model: KimiForCausalLM, stream: torch.Tensor, length: int) -> float:
    """Nats summed over the held-out stream's tokens, in windows of `length` that begin without context."""
    total = 0.0
    for start in range(0, len(stream) - 1, 16 * length):
        part = stream[start : start + 16 * length + 1].long()
        rows = (len(part) - 1) // length
        blocks = [part[: rows * length + 1]] if rows else []
        if len(part) - 1 > rows * length:
            blocks.append(part[rows * length :])
        for block in blocks:
            width = length if len(block) - 1 >= length else len(block) - 1
            logits = model.training_logits(block[:-1].view(-1, width))
            total += F.cross_entropy(logits.flatten(0, 1).float(), block[1:], reduction="sum").item()
    return total


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    streams = {
        k: torch.from_numpy(v.astype(np.int32)).to(args.device)
        for k, v in np.load(args.data / "tokens.npz").items()
    }
    corpus = json.loads((args.data / "corpus.json").read_text())
    model = KimiForCausalLM(load_config(CONFIG_FOLDER), torch.float32)
    initialize(model)
    model.to(args.device).train()
    trainer = Trainer(model, args.batch, args.length)
    gen = torch.Generator().manual_seed(args.seed)
    begin = time.monotonic()
    if trainer.on_gpu:
        trainer.tokens.copy_(crops(streams, args.batch, args.length, gen))
        trainer.capture()
    steps, curve, measured = args.steps or 1_000_000, [], None
    step = 0
    while step < steps:
        trainer.set_rate(rate_at(step, steps))
        trainer.run(crops(streams, args.batch, args.length, gen))
        if step in (5, 25) and not args.steps:
            loss, now = trainer.loss.item(), time.monotonic()
            if measured:
                left = args.minutes * 60 - (now - begin)
                steps = step + int(left / ((now - measured) / 20))
                print(f"{(now - measured) / 20 * 1e3:.1f} ms a step, {steps} steps", flush=True)
            measured = now
        if step % 50 == 0:
            loss = trainer.loss.item()
            curve.append((step, loss))
            print(f"step {step} loss {loss:.4f} {time.monotonic() - begin:.0f} s", flush=True)
            if not math.isfinite(loss):
                raise SystemExit("the loss is not finite: lower PEAK_RATE")
        step += 1
    finish(model, streams["held_out"], corpus, curve, steps, time.monotonic() - begin, args)


def finish(model, held_out, corpus, curve, steps, seconds, args) -> None:  # noqa: ANN001
    """Round the weights to bf16 as they ship, judge them, write checkpoint, record and curve."""
    args.out.mkdir(parents=True, exist_ok=True)
    save_weights(model, args.out / "model.safetensors", torch.bfloat16, pad_heads_to=4)
    with torch.no_grad():
        for p in model.checkpoint_tensors().values():
            if p.ndim >= 1 and p.dtype == torch.float32:
                p.copy_(p.to(torch.bfloat16))
    model.eval()
    nats = held_out_loss(model, held_out, args.length)
    bits = nats / math.log(2) / corpus["held_out_bytes"]
    record = {
        "seed": args.seed, "steps": steps, "batch": args.batch, "length": args.length,
        "tokens": steps * args.batch * args.length, "minutes": round(seconds / 60, 2), "device":
        args.device_name, "torch": torch.__version__, "parameters": sum(p.numel() for p in
        model.parameters()), "held_out_bits_per_byte": round(bits, 4), "xz_bits_per_byte":
        round(corpus["xz_bits_per_byte"], 4), "final_train_loss_nats": curve[-1][1], "curve": curve, "corpus":
        corpus,
    }  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(record) + "\n")
    write_loss_svg(args.out / "loss.svg", curve, bits)
    print(f"held out: {bits:.4f} bits per byte, xz {corpus['xz_bits_per_byte']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    train(args)


if __name__ == "__main__":
    main()
