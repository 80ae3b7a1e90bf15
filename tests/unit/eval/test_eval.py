"""The comparison tool: its options, its units and resume, its numbers, its report."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eval.__main__ import main
from eval.aggregate import bootstrap, collect, row_of
from eval.charts import chart, ticks
from eval.findings import goals
from eval.methods import EvalError, parse_urls, resolve
from eval.prompts import load
from eval.tables import main_tables, paper_tables


class FakeServer:
    """An OpenAI-compatible server that drafts: answers depend on the prompt alone."""

    def __init__(self, tokens: int, histogram: list[int], die_after: int | None = None) -> None:
        self.requests: list[dict] = []
        self.die_after = die_after
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                outer.requests.append(json.loads(self.rfile.read(length)))
                if outer.die_after is not None and len(outer.requests) > outer.die_after:
                    self.connection.close()
                    return
                text = outer.requests[-1]["messages"][-1]["content"]
                details = {
                    "spec_num_correct_drafts": sum(i * n for i, n in enumerate(histogram)),
                    "spec_verify_ct": sum(histogram),
                    "spec_correct_drafts_histogram": histogram,
                }
                ids = [len(text)] * tokens
                body = {
                    "choices": [{"message": {"content": "answer"}}],
                    "sglext": {"output_ids": [ids], "spec_tokens_details": details},
                }
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake():
    servers = []

    def start(*args, **kwargs) -> FakeServer:
        servers.append(FakeServer(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"turns": ["q" * (i + 1), "more"]}) for i in range(6)]
    (folder / "gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run_command(data, out, target: FakeServer, ours: FakeServer, *more: str) -> int:
    command = ["run", "--target", "any", "--data-dir", str(data), "--out", str(out)]
    command += ["--methods", "target,hyperdflash6", "--benchmarks", "gsm8k", "--rounds", "2"]
    command += ["--server", f"target={target.url}", "--server", f"hyperdflash6={ours.url}"]
    return main([*command, "--num-prompts", "3", "--max-new-tokens", "5", *more])


def test_a_run_becomes_rows_and_a_report(data, tmp_path, fake, capsys):
    target, ours = fake(4, []), fake(4, [1, 0, 0, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours, "--temperature", "0", "1") == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    row = next(r for r in rows if (r["method"], r["temperature"]) == ("hyperdflash6", 0))
    assert (row["tau"], row["num_prompts"], row["output_tokens"]) == (2.5, 3, 2 * 3 * 8)
    assert row["position_acceptance"] == [0.5, 0.5, 0.5, 0, 0, 0]
    assert row["identical_to_target"] is True and row["identical_answers"] == 6
    assert row["round_cost"] == pytest.approx(row["tau"] / row["speedup"])
    assert row["tau_interval"] == [2.5, 2.5]
    sampled = next(r for r in rows if (r["method"], r["temperature"]) == ("hyperdflash6", 1))
    assert sampled["identical_to_target"] is None
    assert {r["method"] for r in rows} == {"target", "target-again", "hyperdflash6"}
    # Every second turn saw the answer to the first.
    assert [m["role"] for m in ours.requests[1]["messages"]] == ["user", "assistant", "user"]
    text, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    for content in (text, page):
        assert "HyperDFlash (6)" in content and "Noise floor" in content
        assert "The paper&#x27;s: DeepSeek-V4-Flash" in content or "The paper's: " in content
    assert "<script" not in page and "http" not in page.replace("http://127", "")
    assert "viewport" in page and "<svg" in page


def test_a_finished_run_asks_nothing_again_and_another_run_is_refused(data, tmp_path, fake, capsys):
    target, ours = fake(4, []), fake(4, [1, 1])
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 0
    asked = len(ours.requests)
    assert run_command(data, out, target, ours) == 0
    assert len(ours.requests) == asked
    assert run_command(data, out, target, ours, "--num-prompts", "2") == 2
    assert "holds a run with other prompts" in capsys.readouterr().err


def test_a_server_that_dies_costs_its_cells_only_and_they_are_tried_again(
    data, tmp_path, fake, capsys
):
    target, ours = fake(4, []), fake(4, [1, 1], die_after=8)
    out = tmp_path / "out"
    assert run_command(data, out, target, ours) == 1
    rows = {r["method"]: r for r in json.loads((out / "results.json").read_text())["rows"]}
    assert "ConnectionError" in rows["hyperdflash6"]["error"]
    assert rows["hyperdflash6"]["rounds"] == 1 and rows["hyperdflash6"]["tau"] == 1.5
    assert "error" not in rows["target"] and "incomplete: hyperdflash6" in capsys.readouterr().out
    units = out / "units" / "gsm8k-t0-off-c1"
    assert "error" in json.loads((units / "hyperdflash6-r1.json").read_text())
    ours.die_after = None
    assert run_command(data, out, target, ours) == 0
    rows = {r["method"]: r for r in json.loads((out / "results.json").read_text())["rows"]}
    assert "error" not in rows["hyperdflash6"] and rows["hyperdflash6"]["rounds"] == 2


def test_empty_answers_are_counted(data, tmp_path, fake):
    target, ours = fake(4, []), fake(0, [])
    assert run_command(data, tmp_path / "out", target, ours) == 0
    rows = {r["method"]: r for r in collect(tmp_path / "out")["rows"]}
    assert rows["hyperdflash6"]["empty_answers"] == 6
    assert rows["hyperdflash6"]["identical_to_target"] is False


@pytest.mark.parametrize(
    "options, message",
    [
        ("--methods target,magic --target any", "unknown method 'magic'; known are target, mtp3"),
        ("--methods hyperdflash6 --target any --hyperdflash-draft x", "must hold target"),
        ("--methods target,dflash6 --target any", "needs --dflash-draft"),
        ("--methods target", "--target is needed"),
        ("--methods target --target any --benchmarks nothing", "nothing.jsonl does not exist"),
        ("--methods target --target any --server ours", "takes name=url"),
        ("--methods target --target any --rounds 0", "--rounds must be at least 1"),
    ],
)
def test_bad_commands_say_what_to_do(tmp_path, capsys, options, message):
    assert main(["run", "--out", str(tmp_path / "out"), *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line, message",
    [("{", 'expected {"turns"'), ('{"turns": "x"}', "must be a list"), ("[]", "expected")],
)
def test_bad_benchmark_lines_are_named(tmp_path, line, message):
    (tmp_path / "b.jsonl").write_text('{"turns": ["ok"]}\n' + line + "\n")
    with pytest.raises(EvalError, match=rf"b\.jsonl:2: .*{message.split()[0]}"):
        load(tmp_path, ["b"], 10)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(EvalError, match="is empty"):
        load(tmp_path, ["b"], 10)


def test_prompts_are_spread_over_the_file(tmp_path):
    lines = [json.dumps({"turns": [str(i)]}) for i in range(10)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    found = load(tmp_path, [str(tmp_path / "own.jsonl")], 3)
    assert found == {"own": [["0"], ["3"], ["6"]]}


def test_methods_become_server_arguments():
    drafts = {"mtp_draft": None, "hyperdflash_draft": "d"}
    methods = {m.name: m for m in resolve(["hyperdflash6", "mtp3", "target"], drafts, {})}
    assert list(methods) == ["target", "mtp3", "hyperdflash6"]
    assert methods["target"].arguments == ()
    text = " ".join(methods["mtp3"].arguments)
    assert "EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1" in text
    assert text.endswith("--speculative-num-draft-tokens 4")
    assert methods["hyperdflash6"].arguments[-1] == "d"
    assert parse_urls(["target=http://a:1/"]) == {"target": "http://a:1"}


def test_the_bootstrap_covers_a_known_mean():
    values = [float(i % 7) for i in range(400)]
    low, high = bootstrap(len(values), lambda at: sum(values[i] for i in at) / len(at))
    assert low < 3.0 < high and high - low < 0.6
    assert bootstrap(1, lambda at: 0.0) is None


def unit(seconds: float, ids: list[list[int]], drafts: int = 0, rounds: int = 0) -> dict:
    answers = [
        {
            "output_ids": [i],
            "seconds": seconds / len(ids),
            "correct_drafts": drafts,
            "verify_rounds": rounds,
            "histogram": [],
        }
        for i in ids
    ]
    return {"seconds": seconds, "answers": answers}


def test_speedup_is_against_target_of_the_same_round():
    cell = {"benchmark": "b", "temperature": 0.0, "thinking": "off", "concurrency": 1}
    ids = [[1, 2], [3, 4]]
    target = [unit(4.0, ids), unit(8.0, ids), {"error": "gone"}]
    ours = [unit(2.0, ids, 3, 2), unit(2.0, [[1, 2], [3, 9]], 3, 2), unit(1.0, ids, 3, 2)]
    row = row_of(cell, {"name": "mtp3", "num_drafts": 3}, ours, target)
    assert row["speedup_range"] == [2.0, 4.0] and row["speedup"] == 3.0
    assert row["tau"] == 2.5 and row["rounds"] == 3
    assert (row["identical_answers"], row["compared_answers"]) == (5, 6)
    assert row["identical_to_target"] is False
    missing = row_of(cell, {"name": "mtp3", "num_drafts": 3}, [None], [None])
    assert missing["error"] == "not run" and missing["tau"] is None


def result(method: str, benchmark: str, tau: float, speedup: float, **more) -> dict:
    row = {"method": method, "benchmark": benchmark, "tau": tau, "speedup": speedup}
    return row | {"temperature": 0.0, "thinking": "off", "concurrency": 1} | more


def test_tables_are_the_paper_s_and_goals_are_said_plainly():
    rows = [
        result("target", "gsm8k", 1.0, 1.0),
        result("mtp3", "gsm8k", 3.0, 2.0),
        result("hyperdflash6", "gsm8k", 4.0, 1.5),
        result("mtp3", "mt-bench", 2.0, 2.0),
        result("hyperdflash6", "mt-bench", 3.0, 1.5, error="died"),
    ]
    (table,) = main_tables(rows)
    assert table.heads == (
        *("gsm8k speedup", "gsm8k τ", "mt-bench speedup", "mt-bench τ"),
        *("average speedup", "average τ"),
    )
    assert dict(table.lines)["MTP (3)"] == ("2.00", "3.00", "2.00", "2.00", "2.00", "2.50")
    assert dict(table.lines)["HyperDFlash (6)"] == ("1.50", "4.00", "failed", "failed", "-", "-")
    ((rival, words),) = goals(rows)
    assert rival == "MTP (3), temperature 0"
    assert "mean τ 4.00 against 2.50 (1.60x, above)" in words
    assert "mean speedup 1.50 against 2.00 (0.75x, NOT above)" in words
    (paper,) = paper_tables(rows)
    assert dict(paper.lines)["HyperDFlash (6)"][:2] == ("3.80", "4.04")
    assert dict(paper.lines)["MTP (3)"][-2:] == ("2.25", "2.93")


def test_charts_are_plain_svg():
    assert ticks(0, 1)[0] == 0 and ticks(0, 1)[-1] >= 1
    svg = chart(
        "T<1>", {"a & b": [(1, 0.5), (64, 0.2)], "none": []}, x="c", y="v", logarithmic=True
    )
    assert "T&lt;1&gt;" in svg and "a &amp; b" in svg and "<polyline" in svg and "none" in svg
    assert chart("empty", {"a": []}, x="x", y="y") == ""
