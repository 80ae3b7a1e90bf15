"""Draw the figures of README and docs, and write README's table of results: ``make figures``.

Every figure is drawn twice, for light and for dark pages: ``NAME-light.svg`` and
``NAME-dark.svg``. Numbers come from committed results. Each file carries a digest of this script
and of its numbers, so that a test can tell whether a figure is out of date. A unit is a point; a
phone shows about 0.85 pixels of each, so text has 12 units.
"""

import hashlib
import inspect
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from examples.tiny_deepseek_v4 import study_report as study

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
README = ROOT / "README.md"
TABLE_BEGIN = "<!-- table of docs/figures/draw.py: begin -->\n"
TABLE_END = "<!-- table of docs/figures/draw.py: end -->\n"

# Every method's label, hue and marker. The hues read on white and on black.
METHODS = {
    "mtp6": ("MTP", "#8b949e", "v"),
    "dflash6": ("DFlash", "#10a37f", "s"),
    "dspark-style": ("DSpark-style", "#d97706", "^"),
    "dflash2-style": ("DFlash 2-style", "#a855f7", "P"),
    "hyperdflash6": ("HyperDFlash", "#3b82f6", "o"),
    "hyperdflash2": ("HyperDFlash-2", "#e5484d", "D"),
}
# In-distribution benchmarks: text of the kinds that the tiny target was trained on.
IN_DISTRIBUTION = ("math", "code", "chat")
# This project's methods, and the names that studies of several trainings have for them.
OURS = {"hyperdflash6": "hyperdflash", "hyperdflash2": "hyperdflash2"}
# Other variants of the study of three trainings; the first is the reference of the others.
REFERENCE, WITH_HEAD = "dflash", "dflash, dependency head"

Row = Mapping[str, Any]
Theme = Mapping[str, str]
COLOURS = ("ink", "soft", "line", "panel", "accent", "good", "bonus")
THEMES: Mapping[str, Theme] = {
    name: dict(zip(COLOURS, hues, strict=True))
    for name, hues in {
        "light": ("#1f2328", "#59636e", "#8c959f", "#f6f8fa", "#0969da", "#1a7f37", "#bc4c00"),
        "dark": ("#f0f6fc", "#9198a1", "#6e7681", "#151b23", "#4493f8", "#3fb950", "#f0883e"),
    }.items()
}
# One hue for each residual stream, which reads on white and on black, too.
STREAMS = ("#3b82f6", "#d97706", "#10a37f", "#a855f7")
WIDTH = 420
STYLE = {"svg.hashsalt": "hyperdflash", "svg.fonttype": "none", "font.size": 12}
STYLE |= {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "axes.titlesize": 12}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
STYLE |= {"patch.force_edgecolor": True, "patch.linewidth": 1.2, "legend.frameon": False}
COLOURED = {"text.color": "ink", "axes.labelcolor": "ink", "axes.edgecolor": "line"}
COLOURED |= {"xtick.color": "soft", "ytick.color": "soft"}
COLOURED |= {"patch.facecolor": "panel", "patch.edgecolor": "line"}


def read(result: str) -> dict[str, Any]:
    """Return a committed result."""
    return json.loads((ROOT / "eval" / "results" / f"{result}.json").read_text())


def pooled(content: Row, method: str, known: bool, temperature: int, key: str) -> Any:
    """Return ``key`` over all rounds of a method on in-distribution (``known``) or other sets."""
    setting = {"method": method, "temperature": temperature, "thinking": "off", "concurrency": 1}
    rows = [row for row in content["rows"] if setting.items() <= row.items()]
    rows = [row for row in rows if known == (row["benchmark"] in IN_DISTRIBUTION)]
    rounds = [row["verify_rounds"] for row in rows]
    return np.average([row[key] for row in rows], axis=0, weights=rounds).tolist()


def over_dflash(content: Row) -> dict[str, list[list[float]]]:
    """Return τ over DFlash's, if measured: mean, low and high, at temperature 0 and 1."""
    seeds, sets = list(content["seeds"].values()), content["nats"]["0"]

    def compare(name: str, t: str) -> list[float]:
        pair = (study.tokens_per_round(seeds, n, t, *sets) for n in (name, REFERENCE))
        means, low, high = study.ratios(*pair)
        return [float(value) for value in (means.mean(), low, high)]

    labels = {WITH_HEAD: "DFlash with head"} | {name: METHODS[m][0] for m, name in OURS.items()}
    names = [n for n in labels if all({n, REFERENCE} <= variants.keys() for variants in seeds)]
    return {labels[name]: [compare(name, t) for t in "01"] for name in names}


def numbers() -> dict[str, Any]:
    """Return what each figure and README's table show, from committed results."""
    tiny = read("tiny/results")
    settings = [(known, temperature) for known in (True, False) for temperature in (0, 1)]
    taus = {m: [pooled(tiny, m, *s, "tau") for s in settings] for m in METHODS}
    shares = {m: pooled(tiny, m, True, 0, "position_acceptance") for m in METHODS}
    shown = {"taus": taus, "shares": shares, "ratios": over_dflash(read("three_seeds/results"))}
    return {"results": shown, "learning": read("learning/result")}


def with_table(readme: str, data: Row) -> str:
    """Return README's text with its table of results rewritten, one line per method."""
    start, rest = readme.split(TABLE_BEGIN)
    head = ["method", *(f"τ {where}, T={t}" for where in ("in", "out") for t in (0, 1))]
    taus = data["results"]["taus"]
    rows = [[METHODS[m][0], *(f"{value:.2f}" for value in taus[m])] for m in METHODS]
    table = "\n".join(study.table(head, rows))
    return start + TABLE_BEGIN + table + "\n" + TABLE_END + rest.split(TABLE_END)[1]


def digest(name: str, data: Row) -> str:
    """Return 16 hex digits of what a figure depends on: this script and the numbers in it."""
    shown = json.dumps(data.get(name), sort_keys=True)
    return hashlib.sha256(Path(__file__).read_bytes() + shown.encode()).hexdigest()[:16]


def canvas(height: float) -> Axes:
    """Return axes in units, with y downwards and without a frame."""
    axes = Figure(figsize=(WIDTH / 72, height / 72)).add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    return axes


def note(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write text, centred unless ``style`` says otherwise."""
    axes.text(x, y, text, **{"ha": "center", "va": "center"} | style)


def arrows(axes: Axes, columns: Sequence[float], y: float, end: float, by: float = 0) -> None:
    """Draw an arrow down from ``y`` in each column, which ends ``by`` units to the right."""
    xs = [x for column in columns for x in (column, column + by, np.nan)]
    axes.plot(xs, [y, end, np.nan] * len(columns), linewidth=1.2)
    axes.plot([x + by for x in columns], [end - 2] * len(columns), "v", markersize=4)


# A round of the tiny target with `drafter/`, served at full width without copies, at temperature 0.
# Blanks before words are not shown.
ANSWER = ("Name", ":", "Gina", "\\n", "Age", ":", '" "', "4")
DRAFTED = ("1", "\\n", "City", ":", "Dublin", "\\n")
CHOSEN = ("1", "\\n", "City", ":", "Oslo", "\\n", "Pet")
PITCH = 51.0
CENTRES = [6 + PITCH * (i + 0.5) for i in range(len(ANSWER))]


def cells(axes: Axes, theme: Theme, y: float, tokens: Row, hues: Mapping[int, str]) -> None:
    """Draw tokens by column; ``hues`` says which columns have another colour."""
    for column, text in tokens.items():
        x, hue = CENTRES[column], hues.get(column, "line")
        dashed = {"linestyle": (0, (3, 2)), "facecolor": "none"} if hue == "soft" else {}
        axes.add_patch(Rectangle((x - 23, y), 46, 24, edgecolor=theme[hue], **dashed))
        note(axes, x, y + 12, text, color=theme[hues.get(column, "ink")])


def band(axes: Axes, y: float, h: float, name: str, does: str, columns: int = 7, **edge) -> None:
    """Draw one step of a round, as wide as the tokens that it takes."""
    right = 6 + PITCH * columns
    axes.add_patch(Rectangle((6, y), right - 6, h, **edge))
    note(axes, 13, y + 12, name, ha="left", fontweight="bold")
    note(axes, right - 7, y + 12, does, ha="right")


def method(theme: Theme, _data: None) -> Figure:
    """One round of HYPERDFLASH, with tokens of the tiny target.

    The target's last layer has four residual streams per token. A gate, which starts as the
    target's hc_head, makes them one feature per token. The drafter reads the features and proposes
    six tokens after the anchor in one pass: 1, newline, City, colon, Dublin, newline. The target
    verifies all seven rows in one pass. It accepts four drafts, rejects Dublin, and adds Oslo.
    """
    axes, known = canvas(466), CENTRES[:7]
    accent = {"edgecolor": theme["accent"]}
    text = "Prompt: Gina is 41 years old, lives in Oslo and has a pet\ndog. Write this as a form."
    note(axes, 6, 18, f"{text} The answer so far:", ha="left", color=theme["soft"])
    cells(axes, theme, 42, dict(enumerate(ANSWER)), {7: "accent"})
    note(axes, CENTRES[7], 78, "anchor", color=theme["accent"])
    arrows(axes, known, 66, 76)
    band(axes, 76, 24, "target", "last layer: four residual streams per token")
    for k, hue in enumerate(STREAMS):
        axes.vlines([x - 12 + 8 * k for x in known], 100, 124, colors=hue, linewidth=2.6)
    band(axes, 124, 24, "gate", "starts as hc_head; one feature per token", **accent)
    arrows(axes, known, 148, 184)
    axes.plot(known, [163] * 7, "s", color=theme["accent"], markersize=12)
    note(axes, CENTRES[7], 163, "features", color=theme["soft"])
    band(axes, 184, 62, "drafter", "reads all features, drafts six in one pass", **accent)
    cells(axes, theme, 212, dict(enumerate((ANSWER[-1], *["mask"] * 6))), {0: "accent"})
    arrows(axes, known, 246, 260)
    block = dict(enumerate((ANSWER[-1], *DRAFTED)))
    cells(axes, theme, 260, block, {0: "accent", 5: "soft", 6: "soft"})
    axes.plot([CENTRES[5] - 23, CENTRES[5] + 23], [284, 260], linewidth=1)
    note(axes, CENTRES[7], 272, "drafts", color=theme["soft"])
    arrows(axes, known, 284, 298)
    band(axes, 298, 54, "target", "verifies all seven rows in one pass", 8)
    arrows(axes, known, 322, 366, PITCH)
    hues = dict.fromkeys(range(1, 5), "good") | {5: "bonus", 6: "soft", 7: "soft"}
    cells(axes, theme, 366, dict(enumerate(CHOSEN, 1)), hues)
    note(axes, CENTRES[0], 378, "target:", color=theme["soft"])
    note(axes, CENTRES[2] + PITCH / 2, 402, "four drafts accepted", color=theme["good"])
    text = "Dublin rejected,\nOslo is the bonus"
    note(axes, CENTRES[5] - 23, 410, text, ha="left", color=theme["bonus"])
    text = "One pass of the target, five tokens: 1 \\n City : Oslo"
    note(axes, WIDTH / 2, 450, text, fontweight="bold")
    return axes.figure


STEPS = (
    ("init", "reads the target's config and hc_head", "an untrained drafter"),
    ("regenerate", "the target answers your prompts", "answers (JSONL)"),
    ("capture", "SGLang prefills each answer once", "target states (shards)"),
    ("train", "CE + alpha KL, exact resume", "a trained drafter"),
    ("serve", "SGLang with HYPERDFLASH", "lossless speedup"),
)


def training(theme: Theme, _data: None) -> Figure:
    """From a target to a served drafter in five commands.

    They are init, regenerate, capture, train and serve. The tiny target needs no capture.
    """
    axes = canvas(292)
    for i, (name, does, gives) in enumerate(STEPS):
        y, edge = 4 + 53 * i, theme["good" if name == "serve" else "accent"]
        line = (0, (4, 2)) if name == "capture" else "-"
        axes.add_patch(Rectangle((6, y), 106, 38, edgecolor=edge, linestyle=line))
        note(axes, 59, y + 19, name, fontweight="bold")
        note(axes, 124, y + 10, does, ha="left")
        note(axes, 124, y + 28, f"gives {gives}", ha="left", color=theme["soft"])
        if i + 1 < len(STEPS):
            arrows(axes, [59], y + 38, y + 53)
    text = "The tiny target needs no capture: train runs it itself."
    note(axes, 6, 280, text, ha="left", color=theme["soft"])
    return axes.figure


def panels(*heights: float) -> Sequence[Axes]:
    """Return plots of these heights, one below the other."""
    figure = Figure(figsize=(WIDTH / 72, sum(heights) / 72), layout="constrained")
    return figure.subplots(len(heights), 1, height_ratios=heights)


def dots(axes: Axes, labels: Sequence[str], series: Sequence[tuple]) -> None:
    """Plot series of temperature, values by row, errors, keywords; open at temperature 1."""
    ys = np.arange(len(labels))
    for t, values, errors, style in series:
        style = style | {"xerr": errors, "fillstyle": ("full", "none")[t]}
        axes.errorbar(values, ys + 0.3 * t - 0.15, **style)
    axes.set_yticks(ys, labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", alpha=0.25)


def results(theme: Theme, data: Row) -> Figure:
    """Accept length of each method, and acceptance by drafted position.

    Tokens per verification are shown in-distribution and out of it, at temperature 0 and 1, and
    the share of rounds that accept the draft at each position.
    """
    top, *middle, bottom = panels(250, *[130] * bool(data["ratios"]), 330)
    series = []
    for k, values in enumerate(zip(*data["taus"].values(), strict=True)):
        where, hue, marker = (("in-", "accent", "o"), ("out of ", "bonus", "D"))[k // 2]
        style = {"label": f"{where}distribution, T = {k % 2}", "color": theme[hue], "fmt": marker}
        series.append((k % 2, values, None, style))
    dots(top, [METHODS[name][0] for name in data["taus"]], series)
    top.set(title="One long training each", xlabel="accept length τ (tokens per verification)")
    top.figure.legend(loc="outside upper center", ncols=2)
    for axes in middle:
        means, lows, highs = np.array(list(data["ratios"].values())).transpose(2, 1, 0)
        errors, style = (means - lows, highs - means), {"fmt": "o", "color": theme["ink"]}
        series = [(t, means[t], [error[t] for error in errors], style) for t in (0, 1)]
        dots(axes, list(data["ratios"]), series)
        axes.axvline(1, linewidth=1)
        axes.set(title="Three short trainings, all sets, 95% intervals", xlabel="τ over DFlash's")
    for name, (label, hue, marker) in METHODS.items():
        style = {"color": hue, "marker": marker, "linewidth": 2.6 if name in OURS else 1.3}
        bottom.plot(range(1, 7), data["shares"][name], label=label, **style)
    bottom.set(xlabel="drafted position", ylabel="share of rounds accepting it", ylim=(0, 1))
    bottom.set_title("One long training each, in-distribution, T = 0")
    bottom.legend(loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=2)
    return top.figure


def learning(theme: Theme, result: Row) -> Figure:
    """A drafter learns from its server's traffic.

    Accept length and tokens per second over minutes. Both rise as versions are published, fall
    when new kinds of questions come, and rise again. A random drafter is rolled back.
    """
    tau_axes, speed = panels(230, 190)
    minutes = [row["minute"] - 0.5 for row in result["minutes"]]
    turned, poisoned = result["turned_at_minute"], result["poisoned_version"]["minute"]
    for axes, key in ((tau_axes, "tau"), (speed, "tokens_per_second")):
        axes.axvline(turned, color=theme["accent"], linewidth=1.2, linestyle=":")
        axes.axvline(poisoned, color=theme["bonus"], linewidth=1.2, linestyle=":")
        axes.plot(minutes, [row[key] for row in result["minutes"]], color=theme["ink"], linewidth=2)
        axes.set(xlim=(0, minutes[-1] + 1), ylim=(0, None))
    above = {"ha": "right", "transform": tau_axes.get_xaxis_transform()}
    note(tau_axes, turned, 1.04, "new kinds of questions", color=theme["accent"], **above)
    text = "a random drafter is published and rolled back"
    note(tau_axes, poisoned, 1.15, text, color=theme["bonus"], **above)
    published = list(result["published_minutes"].values())
    tau_axes.plot(published, [0.25] * len(published), "|", color=theme["good"], markersize=8)
    note(tau_axes, 3, 0.8, "marks: a version is published", ha="left", color=theme["good"])
    tau_axes.set_ylabel("accept length τ")
    for key, by, text in (
        ("baseline_tokens_per_second", 40, "no speculation"),
        ("baseline_next_to_learn", -40, "no speculation, with learner"),
    ):
        speed.axhline(result[key], linewidth=1.2, linestyle="--")
        note(speed, 3, result[key] + by, text, ha="left", color=theme["soft"])
    speed.set(ylabel="tokens per second", xlabel="minutes")
    return tau_axes.figure


FIGURES = {draw.__name__: draw for draw in (method, training, results, learning)}


def svg(name: str, theme: str, data: Row) -> str:
    """Return a figure as SVG, titled and described by its function's docstring."""
    draw, hues, file = FIGURES[name], THEMES[theme], io.StringIO()
    title, _, description = inspect.getdoc(draw).partition("\n\n")
    style = STYLE | {key: hues[colour] for key, colour in COLOURED.items()}
    style["axes.prop_cycle"] = f"cycler(color=['{hues['soft']}'])"
    with matplotlib.rc_context(style):
        metadata = {"Date": None, "Title": title, "Description": f"drawn from {digest(name, data)}"}
        figure = draw(hues, data.get(name))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    # The font is named once, and only as generic: it need not be installed where a figure is read.
    text = file.getvalue().replace("font-size: 12px; font-family: 'DejaVu Sans', sans-serif; ", "")
    text = text.replace("<svg ", '<svg role="img" style="font: 12px sans-serif" ', 1)
    return text.replace("</title>", f"</title>\n <desc>{description}</desc>", 1)


def main() -> None:
    """Draw everything, and write README's table."""
    data = numbers()
    for name in FIGURES:
        for theme in THEMES:
            (HERE / f"{name}-{theme}.svg").write_text(svg(name, theme, data))
    README.write_text(with_table(README.read_text(), data))


if __name__ == "__main__":
    main()
