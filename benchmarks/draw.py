"""Draw the tables and charts of README.md and of three pages of docs/ from benchmarks/results/*.csv.

`python benchmarks/all.py tables` calls this. A table stands between <!-- NAME --> and <!-- end -->, where NAME is of
TABLES or of a CSV file. A chart holds the digest of its data and is drawn again only if they change, or if it is gone.
"""

import csv
import hashlib
import math
import re
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import numpy as np

PAGES = ("README.md", "docs/results.md", "docs/recipes.md", "docs/distributed.md")
CHART = "benchmarks/results/attention.svg"
ROOT = Path(__file__).parents[1]
ATTENTION = ("attention_64", "attention_128", "attention_128_rest", "attention_256")  # CSV files
MACHINE = ("chip", "commit", "torch", "triton")  # columns of every CSV file
HIDDEN = ("job", "target", "curve")  # columns that no page shows
ALL_BUT_LOSS = ("bits/byte", "test books", "tokens/s", "s in all")
OURS = {"hopper": "our Hopper", "triton": "our Triton"}
PEERS = OURS | {"flash": "PyTorch flash", "cudnn": "PyTorch cuDNN", "flash4": "flash-attn-4"}
ALL_PEERS = PEERS | {"flex": "FlexAttention", "fla": "FLA"}
# (text, panel, length) of the tables of attention
CAUSAL_CASES = [
    ("the layer of GPT-2 124M: D 64", "GPT-2 124M layer", 1024),
    ("D 64", "d64 causal", 4096),
    ("D 128", "d128 causal", 4096),
    ("D 128, 32 query and 8 key heads", "d128 causal 32/8 heads", 4096),
    ("D 128, packed documents of 512 on average", "d128 documents of 512", 16_384),
]
CASES = [
    *CAUSAL_CASES,
    ("D 256", "d256 causal", 4096),
    ("D 128, window of 1,024", "d128 window 1024", 16_384),
    ("D 128, full", "d128 full", 4096),
]
FITTED = ("depth 2", "depth 4", "depth 6")  # runs that the power law is fitted to


def rows_of(path):
    """The rows of a CSV file; none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read(*names):
    """The rows of these CSV files of results, one after the other."""
    return [row for name in names for row in rows_of(ROOT / "benchmarks" / "results" / f"{name}.csv")]


def markdown(rows, names, hide=()):
    """A Markdown table of the rows, and a line that says where they were measured. names: of the CSV files.

    What differs from row to row of chip, commit and versions becomes a column. Columns without any value and those in
    `hide` are left out.
    """
    if not rows:
        return ""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = {row.get(name) for row in rows}
        if any(cells) and name not in (*hide, *MACHINE) and not (name == "caches" and len(cells) == 1):
            columns.append(name)
    same = []
    for name in MACHINE:
        values = list(dict.fromkeys(row[name].partition("+")[0] for row in rows))
        if len(values) > 1:
            columns.append(name)
        else:
            same.append(f"{name} {values[0]}".removeprefix("chip "))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([row.get(name) or "-" for name in columns])
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    files = " ".join(f"`{name}`" for name in names)
    return f"{text}\n({', '.join([*same, files])}) "


def from_csv(*names, **keep):
    """The table of CSV files as it stands there, of rows that have these values."""
    rows = [row for row in read(*names) if all(row[name] == value for name, value in keep.items())]
    return markdown(rows, names, hide=HIDDEN)


def numbers(rows, field):
    """A column of CSV rows; NaN where it is empty."""
    return [float(row[field] or "nan") for row in rows]


def mean_and_deviation(values):
    """As in 23.5 (+- 2.8), with two digits of the standard deviation; of equal values four digits; empty if NaN."""
    if math.isnan(mean(values)):
        return ""
    deviation = stdev(values) if len(values) > 1 else 0
    if not deviation:
        return f"{values[0]:#.4g}"
    places = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{mean(values):.{places}f} (+- {deviation:.{places}f})"


def grouped(rows, *by):
    """{values of these columns: rows}."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(str(row[field]) for field in by), []).append(row)
    return groups


def means(rows, by=("name", "tokens")):
    """Rows of benchmarks/recipes.py, with means over those that have the same `by`."""
    table = []
    for some in grouped(rows, *by).values():
        cells = {"run": some[0]["name"], "tokens": f"{int(some[0]['tokens']) / 1e6:.3g}M"}
        cells["seeds"] = ", ".join(str(row["seed"]) for row in some if row["seed"])
        for field, text in (("loss", "loss"), ("bits", "bits/byte"), ("test", "test books")):
            cells[text] = mean_and_deviation(numbers(some, field))
        for field, text in (("rate", "tokens/s"), ("seconds", "s in all")):
            cells[text] = f"{mean(numbers(some, field)):,.0f}"
        for field in MACHINE:
            cells[field] = ", ".join(dict.fromkeys(row[field] for row in some))
        table.append(cells)
    return table


def runs(*names, hide=(), **by):
    """The means of CSV files of benchmarks/recipes.py, without the columns `hide`."""
    return markdown(means(read(*names), **by), names, hide)


def parts():
    """What the loss rises by without each part of the recipe; a comment above a change says what it leaves out."""
    rows, table = grouped(read("recipe_parts"), "name"), []
    if not (recipe := rows.get(("recipe",))):
        return ""
    cost = f"cost, {int(recipe[0]['tokens']) / 1e6:.3g}M tokens"
    text = (ROOT / "benchmarks" / "changes" / "modern_without.txt").read_text()
    for part, words, name, options in re.findall(r"# (.+?): (.+)\n(\w.*?): ?(.*)", text):
        cells = {"part": part, "without it": options and f"`{options}`", "in plain words": words}
        if some := rows.get((name,)):
            cells[cost] = f"{mean(numbers(some, 'loss')) - mean(numbers(recipe, 'loss')):.3f}"
            cells["tokens/s"] = f"{mean(numbers(some, 'rate')):,.0f}"
        table.append(cells | {field: recipe[0][field] for field in MACHINE})
    return markdown(table, ["recipe_parts"])


def attention(cases, peers, *directions):
    """TFLOP/s of cases by peers; with several directions those of each, as in 304/291."""
    rows, table = read(*ATTENTION), []
    for text, panel, length in cases:
        here = [row for row in rows if row["panel"] == panel and int(row["length"]) == length]
        if not here:  # not measured yet
            continue
        cells = {"case": text, "tokens": f"{length:,}"}
        for name, label in peers.items():
            speeds = {row["direction"]: row["tflops"] for row in here if row["implementation"] == name}
            cells[label] = "/".join(f"{float(speeds[way]):.0f}" for way in directions if way in speeds)
        table.append(cells | {name: here[0][name] for name in MACHINE})
    return markdown(table, ["attention_*"])


def curve(row):
    """[(step, seconds, loss)] of the validations of a row of benchmarks/training.py."""
    points = (point.split(":") for point in row["curve"].split())
    return [(int(step), float(seconds), float(loss)) for step, seconds, loss in points]


def books():
    """Losses of GPT-2 on books, at every second evaluation."""
    table = []
    rows = [row for row in read("books") if row["job"] == "books"]  # the recipe's is for README's chart
    for row in rows:
        losses = {f"step {step:,}": f"{loss:.3f}" for step, _, loss in curve(row)[::2]}
        table.append({"validation loss": row["trainer"]} | losses | row)
    return markdown(table, ["books"], hide=(*HIDDEN, "trainer", "best loss"))


def steps():
    """Parts of a step of two networks, side by side."""
    columns = {
        "step_gpt2": ("GPT-2, 32 x 1,024 tokens", "floor, GPT-2"),
        "step_char": ("shakespeare_char, 64 x 256 tokens", "floor, char"),
    }
    table = {}
    for name, (text, floor) in columns.items():
        for row in read(name):
            cells = table.setdefault(row["part"], row)
            cells[text], cells[floor] = row["ms"], row["floor"]
    return markdown(list(table.values()), columns, hide=("ms", "floor"))


# name of a marker -> what draws its table; other names are those of CSV files
TABLES = {
    "attention": partial(attention, CASES, ALL_PEERS, "both"),
    "attention_directions": partial(attention, CAUSAL_CASES, PEERS, "forward", "backward"),
    # without its last line: README leaves chip and commit to docs/results.md
    "attention_readme": lambda: attention([*CAUSAL_CASES, CASES[-1]], PEERS, "both").rpartition("(")[0],
    "char": partial(from_csv, "char_cold", "char"),
    "shakespeare": partial(from_csv, "shakespeare_cold", "shakespeare"),
    "books": books,
    "steps": steps,
    "fp8": partial(runs, "fp8", by=("name", "seed", "tokens")),  # with each seed a pair
    "recipe": partial(runs, "recipe_control", "recipe_seeds"),
    "parts": parts,
    "few_books": partial(runs, "few_books_control", "few_books", hide=ALL_BUT_LOSS),
    "tuning": partial(runs, "tuning", "tuning_long", "recipe_control", hide=ALL_BUT_LOSS),
    "depths": partial(runs, "depths", hide=("tokens/s", "s in all")),  # some shared a machine
    "several_gpus": partial(from_csv, "two_gpus_ddp", "two_gpus_xl", "one_gpu_largest"),
    "sampling_attention": partial(from_csv, "sampling_attention", context="32,768"),
}


def drawn(text):
    """A page with its tables drawn anew."""

    def table(found):
        name = found[1]
        draw = TABLES.get(name) or partial(from_csv, name)
        return f"<!-- {name} -->\n\n{draw()}<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def chart(title, lines, columns, **settings):
    """A figure of lines (label, points (x, y), options of plot()), with settings of its axis.

    It has a white background of its own, for pages in the dark, and letters that a phone can show.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update({"font.size": 13, "axes.titlesize": 13, "svg.hashsalt": "kestrel"})
    figure = Figure(figsize=(7, 4.5), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for label, points, options in lines:
        axis.plot(*zip(*points, strict=True), label=label, **options)
    axis.set(title=title, **settings)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    return figure


def attention_chart(rows):
    rows = [row for row in rows if row["panel"] == "d128 causal" and row["direction"] == "both"]
    lines = []
    for name, label in ALL_PEERS.items():
        some = [row for row in rows if row["implementation"] == name]
        points = [(f"{int(row['length']):,}", float(row["tflops"])) for row in some]
        lines.append((label, points, dict(linewidth=3 if name in OURS else 1.5, marker="o")))
    title = f"{rows[0]['chip']}, head dim 128, causal: TFLOP/s by tokens"
    return chart(title, lines, columns=3, ylim=(0, None))


def against_nanogpt(rows):
    """Curves of the recipe and of nanoGPT, nanoGPT's best loss, and after how many seconds each is as low."""
    ours, theirs = (next(curve(row) for row in rows if row["trainer"] == name) for name in ("Kestrel", "nanoGPT"))
    best = min(loss for *_, loss in theirs)
    ours_at, theirs_at = (next(seconds for _, seconds, loss in some if loss <= best) for some in (ours, theirs))
    return ours, theirs, best, ours_at, theirs_at


def losses_chart(rows):
    """Validation losses against seconds since the start of the process, and who is below nanoGPT's best loss when."""
    ours, theirs, best, ours_at, theirs_at = against_nanogpt(rows)
    _, end, last = ours[-1]
    label = f"Kestrel, our recipe: below {best:.2f} after {ours_at:.0f} s, {last:.2f} after {end:.0f} s"
    lines = [
        (name, [(seconds, loss) for _, seconds, loss in some], dict(linewidth=2, marker="o"))
        for name, some in ((label, ours), (f"nanoGPT: its best, {best:.2f}, after {theirs_at:.0f} s", theirs))
    ]
    names = dict(xlabel="seconds since the start", ylabel="validation loss (nats per token)")
    title = f"GPTs of GPT-2's size on books, {rows[0]['chip']}"
    figure = chart(title, lines, columns=1, ylim=(None, 6), **names)  # the first losses are those of guessing
    axis = figure.axes[0]
    axis.annotate("", (ours_at, best), (theirs_at, best), arrowprops=dict(arrowstyle="->", linestyle=":"))
    axis.text(theirs_at, best - 0.17, f"{theirs_at / ours_at:.1f} times sooner", ha="right")
    return figure


def power_law(points):
    """(a, b, c) of y = a + b / x^c, fitted to points (x, y) by least squares; a is a multiple of 0.01."""
    x, y = np.array(points).T

    def fit(a):
        slope, start = np.polyfit(np.log(x), np.log(y - a), 1)
        return np.square(a + np.exp(start) * x**slope - y).sum(), a, np.exp(start), -slope

    return min(fit(a) for a in np.arange(0, y.min(), 0.01))[1:]


def depths_chart(rows):
    """Losses of the dial by operations of a run, with a power law fitted to the depths FITTED."""
    points = {}
    for row in rows:
        point = float(row["gflops"]) * int(row["tokens"]) / 1e6, float(row["loss"])
        points.setdefault(row["name"], []).append(point)
    a, b, c = power_law([point for name in FITTED for point in points[name]])
    every = [x for some in points.values() for x, _ in some]
    law = [(x, a + b / x**c) for x in np.geomspace(min(every), max(every))]
    lines = [(f"{a:.2f} + {b:.2f} / C^{c:.2f}", law, dict(color="gray"))]
    for name, some in points.items():
        fitted = name in FITTED
        options = dict(marker="o", linestyle="none", fillstyle="full" if fitted else "none")
        lines.append((f"{name}, fitted" if fitted else name, some, options))
    title = f"{rows[0]['chip']}: validation loss (nats/token) by C, PFLOP of a run"
    return chart(title, lines, columns=3, xscale="log")


def chart_rows():
    """{file: (its rows, what draws it)} of the charts that have all their data."""
    charts = {CHART: (read(*ATTENTION), attention_chart)}
    depths = read("depths")
    if {row["name"] for row in depths} > set(FITTED):
        charts["docs/images/depths.svg"] = depths, depths_chart
    losses = [row for row in read("books") if row["trainer"] == "nanoGPT" or row["job"] == "recipe"]
    if len(losses) == 2:
        charts["docs/images/losses.svg"] = losses, losses_chart
    return charts


def digest(rows):
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def save(charts):
    """Draw those of chart_rows() whose data have changed, or that are gone."""
    for name, (rows, draw) in charts.items():
        path = ROOT / name
        if not path.exists() or digest(rows) not in path.read_text():
            draw(rows).savefig(path, metadata=dict(Date=None, Description=digest(rows)))
            print(f"drew {name}")


def main():
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        if (new := drawn(old)) != old:
            path.write_text(new)
            print(f"drew the tables of {page}")
    save(chart_rows())
