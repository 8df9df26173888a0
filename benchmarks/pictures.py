"""Draw the pictures of docs/attention.md: `python benchmarks/pictures.py`.

Tiles are recorded from the forward kernel in Triton's interpreter (of 3.9), and memory follows from the settings of the
Hopper kernels. Errors and times are those of errors.csv and timeline.csv, which all.py measures.
"""

import os
import sys
from functools import partial
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from attention import attention
from attention.hopper.launch import BACKWARD, FORWARD
from attention.portable import forward
from benchmarks import draw

BLUE, ORANGE, GREEN, GRAY, WHITE = "tab:blue", "tab:orange", "tab:green", "lightgray", "white"
# title -> queries and keys, heads, key heads, and arguments of attention()
CASES = {
    "causal": (160, 1, 1, {}),
    "causal, window of 64": (160, 1, 1, dict(window=64)),
    "documents of 80, 16, 64": (160, 1, 1, dict(cu_seqlens=torch.tensor([0, 80, 96, 160], dtype=torch.int32))),
    "grouped": (40, 4, 2, {}),
}


def tiles_of(length, heads, kv_heads, options):
    """What forward_kernel does: (image, boxes) of query heads below each other, and key heads side by side.

    image: of each pair 0 if it is in no tile, 1 if a mask hides it, 2 if one shows it, 3 in a tile without a mask.
    boxes: column, row, width and height of each tile.
    """
    image, boxes, lanes = np.zeros((heads * length, kv_heads * length), int), [], []
    fetch_tile, shape_scores = forward.tiles.fetch_tile, forward.shape_scores

    def fetch(lane, *args):
        lanes.append(lane)
        return fetch_tile(lane, *args)

    def shape(scores, q_pos, k_pos, head, seq, terms, rule, masked):
        scores, slope = shape_scores(scores, q_pos, k_pos, head, seq, terms, rule, masked)
        query, key = (int(x.handle.data.min()) for x in (q_pos, k_pos))
        pairs = scores.handle.data[: int(seq.q_len) - query, : int(seq.k_len) - key]
        row, column = int(head * length + seq.q_start) + query, int(lanes[-1].head * length + seq.k_start) + key
        rows, columns = pairs.shape
        image[row : row + rows, column : column + columns] += 1 + np.isfinite(pairs) if masked else 3
        boxes.append((column, row, columns, rows))
        return scores, slope

    q, k = torch.zeros(1, length, heads, 16), torch.zeros(1, length, kv_heads, 16)
    with mock.patch.object(forward.tiles, "fetch_tile", fetch), mock.patch.object(forward, "shape_scores", shape):
        attention(q, k, k, **options, impl="triton")
    return image.tolist(), boxes


def memory():
    """KiB of a program of the Hopper kernels at head dim 128: {title: {where: [(first, size, kind and name)]}}.

    128 numbers of 16 bits are a quarter of a KiB.
    """

    def boxes(limit=0, **kinds):
        found, first = [], 0
        for kind, sizes in kinds.items():
            for name, size in sizes.items():
                found.append((first, size, f"{kind} {name}\n{size:.0f}"))
                first += size
        return [*found, (first, max(limit - first, 0), "other")]

    (keys, pipe), plan = FORWARD[128, 128], BACKWARD[128, 128]
    q, k, s = 16 * pipe.consumers, keys / 4, pipe.consumers * keys / 8
    steps = {}
    steps[f"Forward: KiB in a step of {keys} keys"] = {
        "global memory": boxes(inputs=dict(K=k, V=k)),
        "shared memory": boxes(
            227, inputs=dict(Q=q * pipe.q_stages, K=k * pipe.stages, V=k * pipe.stages), results=dict(O=q)
        ),
        "registers": boxes(256, results=dict(O=2 * q), scores=dict(S=2 * s, P=s)),
    }
    q, k, s, stages = plan.block_q / 4, plan.block_k / 4, plan.block_q * plan.block_k / 512, plan.stages
    steps[f"Backward: KiB in a step of {plan.block_q} queries"] = {
        "global memory": boxes(inputs=dict(Q=q, dO=q), results=dict(dQ=2 * q)),
        "shared memory": boxes(
            227, inputs=dict(K=k, V=k, Q=q * stages, dO=q * stages), scores=dict(dS=s),
            results=dict(dQ=2 * q * plan.dq_stages),
        ),
        "registers": boxes(256, results=dict(dK=2 * k, dV=2 * k), scores={"S, P, dQ": 2 * s, "dP, dS": 2 * s}),
    }  # fmt: skip
    return steps


def timeline():
    """{title: {lane: [(first cycle, cycles, what)]}}."""
    kernels = {}
    for row in draw.read("timeline"):
        lanes = kernels.setdefault(row["kernel"].title() + ": two steps in {:,} cycles", {})
        lanes.setdefault(row["lane"], []).append((int(row["cycle"]), int(row["cycles"]), row["what"]))
    return kernels


def panels(height, colors, **options):
    """A Figure as wide as a page of GitHub, white for pages in the dark, and its axes. colors: of a legend."""
    rcParams.update({"font.size": 10.5, "axes.titlesize": 10.5, "svg.hashsalt": "kestrel"})
    figure = Figure(figsize=(8.6, height), layout="constrained", facecolor=WHITE)
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(colors), frameon=False)
    return figure, figure.subplots(**options)


def draw_tiles(cases):
    colors = {"without a mask": BLUE, "with a mask": ORANGE, "skipped": WHITE, "edge of what is visible": "black"}
    figure, axes = panels(3, colors, ncols=4, width_ratios=[2, 2, 2, 1])
    for axis, (title, (image, boxes)) in zip(axes, cases.items(), strict=True):
        image = np.array(image)
        for column, row, *size in boxes:
            color = BLUE if image[row, column] == 3 else ORANGE
            axis.add_patch(Rectangle((column, row), *size, fc=color, ec=WHITE, lw=0.8))
        (rows, columns), (y, x) = image.shape, (np.arange(size) + 0.5 for size in image.shape)
        axis.contour(x, y, image >= 2, [0.5], colors="black", linewidths=1)
        axis.set(title=title, aspect="equal", xlim=(0, columns), ylim=(rows, 0), xlabel="keys", xticks=[], yticks=[])
    axes[0].set_ylabel("queries")
    axes[3].set(xlabel="2 key heads", ylabel="4 query heads")
    return figure


def draw_lanes(height, colors, panes):
    """{title: {lane: boxes}}; the first word of a box tells its color, and the rest is written in it."""
    figure, axes = panels(height, colors, nrows=2)
    for axis, (title, lanes) in zip(axes, panes.items(), strict=True):
        end = max(first + size for boxes in lanes.values() for first, size, _ in boxes)
        for lane, boxes in lanes.items():
            for first, size, what in boxes:
                kind, _, text = what.partition(" ")
                axis.barh(lane, size, left=first, color=colors[kind], height=0.85, ec=WHITE, lw=0.5)
                if size > end / 45:
                    axis.text(first + size / 2, lane, text, color=WHITE, ha="center", va="center")
        axis.invert_yaxis()
        axis.set_title(title.format(end), loc="left")
        axis.set(xlim=(0, end), xticks=[])
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    return figure


def draw_errors(rows):
    lines = []
    for dtype, color in (("bfloat16", BLUE), ("float16", ORANGE)):
        for who, style in (("eager PyTorch", "--"), ("attention()", "-")):
            points = [(f"{int(row['keys']):,}", float(row[who])) for row in rows if row["dtype"] == dtype]
            lines.append((f"{who}, {dtype}", points, dict(color=color, linestyle=style, linewidth=2)))
    title = f"{rows[0]['chip']}, head dim 128: relative error of the output by keys"
    return draw.chart(title, lines, columns=2, yscale="log", ylim=(1e-4, 1e-2))


def pictures():
    """{file: (its data, what draws it)}."""
    kinds = dict(inputs=BLUE, scores=ORANGE, results=GREEN, other=GRAY)
    doings = dict(copies=BLUE, computes=ORANGE, multiplies=GREEN, waits=GRAY)
    found = dict(
        tiles=({title: tiles_of(*case) for title, case in CASES.items()}, draw_tiles),
        memory=(memory(), partial(draw_lanes, 4.2, kinds)),
        timeline=(timeline(), partial(draw_lanes, 4.6, doings)),
        errors=(draw.read("errors"), draw_errors),
    )
    return {f"docs/images/{name}.svg": picture for name, picture in found.items()}


if __name__ == "__main__":
    draw.save(pictures())
