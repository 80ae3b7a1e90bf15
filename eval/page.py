"""The report as one self-contained HTML page: no script, no network, readable on a phone."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from eval.charts import chart
from eval.findings import cost_points, goals, identity_line, mean_of, noise_line, positions
from eval.methods import BASELINE, NOISE
from eval.tables import LABELS, Table, main_tables, paper_tables

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}h3{font-size:1rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;white-space:nowrap}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:Canvas}
tr.ours{font-weight:600}
.paper{opacity:.75;border-left:3px solid var(--line);padding-left:.8rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1rem}
figure{margin:0;padding:.5rem;background:var(--soft);border-radius:.5rem}
figcaption{font-weight:600}svg{width:100%;height:auto}
svg text{font-size:13px;fill:CanvasText}svg .g{stroke:var(--line)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:0}
.legend{font-size:.85rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.4em}
pre{overflow-x:auto;font-size:.8rem;background:var(--soft);padding:.5rem}
"""


def html_table(table: Table) -> str:
    """A table in a box that scrolls by itself; our method's line in bold."""
    heads = "".join(f"<th>{escape(h)}</th>" for h in ("Method", *table.heads))
    body = []
    for name, cells in table.lines:
        kind = ' class="ours"' if name == LABELS["hyperdflash6"] else ""
        columns = "".join(f"<td>{escape(c)}</td>" for c in (name, *cells))
        body.append(f"<tr{kind}>{columns}</tr>")
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<h3>{escape(table.title)}</h3><div class='scroll'><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>{note}"
    )


def _charts(content: dict[str, Any]) -> str:
    rows = content["rows"]
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m not in (BASELINE, NOISE)]
    acceptance = {LABELS.get(m, m): list(enumerate(positions(rows, m), start=1)) for m in methods}
    costs = {LABELS.get(m, m): [(cost, tau)] for m, cost, tau in cost_points(rows)}
    levels = sorted({r["concurrency"] for r in rows})
    names = [LABELS.get(m, m) for m in (*methods, BASELINE)]
    throughput = {}
    for method in [BASELINE, *methods]:
        found = [(c, mean_of(rows, method, "tokens_per_s", concurrency=c)) for c in levels]
        throughput[LABELS.get(method, method)] = [(c, v) for c, v in found if v is not None]
    if content.get("serving"):
        throughput = {
            LABELS.get(m, m): [(level["concurrency"], level["tokens_per_s"]) for level in levels]
            for m, levels in content["serving"]["concurrency"].items()
        }
    return "".join(
        (
            chart(
                "Acceptance by drafted position (Figure 1), mean of all cells",
                acceptance,
                names=names,
                x="drafted position",
                y="share of rounds that accept it",
            ),
            chart(
                "τ against round cost (up and left is better)",
                costs,
                names=names,
                x="round cost, target-only steps",
                y="τ",
                lines=False,
                zero=False,
            ),
            chart(
                "Throughput against concurrency",
                throughput,
                names=names,
                x="concurrency",
                y="output tokens a second",
                logarithmic=True,
            ),
        )
    )


def write_page(content: dict[str, Any], path: Path) -> None:
    """Write the page."""
    rows, run = content["rows"], content["run"]
    goal = "".join(
        f"<li>HyperDFlash against {escape(rival)}: {escape(words)}.</li>"
        for rival, words in goals(rows)
    )
    noise = noise_line(rows)
    study = ""
    if content.get("serving"):
        from eval.serving_study import study_tables

        study = "<h2>Serving</h2>" + "".join(
            html_table(t) for t in study_tables(content["serving"])
        )
    body = [
        "<h1>Speculative decoding methods side by side</h1>",
        f"<p>Medians over {run['rounds']} interleaved rounds; speedup is against target-only in "
        "the same round, whole requests, prefill included. τ counts the bonus token.</p>",
        f"<p>{escape(identity_line(rows))} {escape(noise or '')}</p>",
        f"<h2>The goal</h2><ul>{goal}</ul>" if goal else "",
        f"<div class='charts'>{_charts(content)}</div>",
        "<h2>Main results</h2>",
        *(html_table(t) for t in main_tables(rows)),
        study,
        "<h2>The paper's own numbers, for comparison only</h2><div class='paper'>",
        *(html_table(t) for t in paper_tables(rows)),
        "</div><h2>Provenance</h2>",
        f"<pre>{escape(json.dumps(content['provenance'], indent=1))}</pre>",
    ]
    path.write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>HYPERDFLASH compared</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n",
        encoding="utf-8",
    )
