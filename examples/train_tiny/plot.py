# SPDX-License-Identifier: Apache-2.0
"""The loss curve as a picture."""

from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 360, 56


def write_loss_svg(path: Path, curve: list[tuple[int, float]], bits_per_byte: float) -> None:
    """Draw training loss in nats per token against steps; the held-out figure is the caption."""
    steps = curve[-1][0] or 1
    low, high = min(loss for _, loss in curve), max(loss for _, loss in curve)
    low, high = int(low * 2) / 2, int(high * 2 + 1) / 2

    def x(step: float) -> float:
        return MARGIN + step / steps * (WIDTH - 2 * MARGIN)

    def y(loss: float) -> float:
        return HEIGHT - MARGIN - (loss - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)
    title = f"kimi-k3-tiny: nats per training token (held out afterwards: {bits_per_byte:.3f} bits per byte)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="14">{title}</text>',
    ]
    ticks = [low + i * 0.5 for i in range(int((high - low) * 2) + 1)]
    for tick in ticks[:: max(1, len(ticks) // 8)]:
        at, right = y(tick), WIDTH - MARGIN
        parts.append(f'<line x1="{MARGIN}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for i in range(5):
        step = steps * i // 4
        at = x(step)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">step</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1f6fb2" stroke-width="1.5"/></svg>')
    path.write_text("\n".join(parts) + "\n")
