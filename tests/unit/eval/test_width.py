"""The width study's table and plots, its load, and the simulated plan."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from eval import width_plan, width_study
from eval.width_account import OTHER_WIDTHS, PARTS, account
from eval.width_plan import expected_tokens, measured, plan, roofline, touched
from eval.width_report import over, pooled, settled_after, table, write_report
from sglang_hyperdflash.serving.round_times import Pass
from sglang_hyperdflash.tools.ownership import claim
from tests.conftest import EXAMPLE

ACCEPTANCE = [0.8] * 6
RATES = {"target": (80, 1000), "target-again": (81, 990), "fixed 7": (140, 650)}
RATES |= {"adaptive": (138, 980), "untrained drafter": (79, 985)}
ACCOUNT = dict.fromkeys((*PARTS, OTHER_WIDTHS), 0.0) | {"target, decoding": 1.0}
SLOWER = ACCOUNT | {"draft K/V, decoding": 0.25}


def rows() -> list[dict]:
    return [
        {
            "temperature": 0.0,
            "concurrency": level,
            "method": method,
            "tokens_per_s": [0.9 * rate[i], rate[i], 1.2 * rate[i]],
            "rounds_by_width": {"1": 25.0, "7": 75.0} if method == "adaptive" else {},
        }
        for i, level in enumerate((1, 64))
        for method, rate in RATES.items()
    ]


def test_the_table_compares_with_the_better_of_both():
    lines = table(rows(), 0.0)
    assert lines[-3] == "- adaptive over the better: 0.983 (0.980 to 0.985)"
    assert lines[-1] == "- target again over target: 1.001 (0.991 to 1.011)"
    ratios = ("0.99 (0.99 to 0.99)", "1: 25%, 7: 75%", "0.99 (0.99 to 0.99)", "1.01 (1.01 to 1.01)")
    assert lines[2] == f"| 1 | 80 | 140 | 138 | {' | '.join(ratios)} |"
    assert lines[3].startswith("| 64 | 1000 | 650 | 980 | 0.98 (0.98 to 0.98) |")


def test_a_ratio_is_of_passes_side_by_side():
    """A machine that is slow for one pair of passes is slow for both of them."""
    pairs = {"target": [100.0, 50.0, 80.0], "adaptive": [120.0, 62.0, 84.0]}
    rows = [
        {"temperature": 0.0, "concurrency": 4, "method": name, "tokens_per_s": found}
        for name, found in pairs.items()
    ]
    assert over(rows, 0.0, 4, "adaptive", "target") == "1.20 (1.05 to 1.24)"
    assert over(rows, 0.0, 4, "untrained drafter", "target") == "-"


def test_pairs_of_all_loads_are_pooled_by_their_logarithms():
    assert pooled([0.5, 2.0]).startswith("1.000 (")
    assert pooled([0.9] * 8) == "0.900 (0.900 to 0.900)" and pooled([0.9]).startswith("0.900")
    wide, narrow = pooled([0.8, 1.25] * 2), pooled([0.8, 1.25] * 50)
    assert (wide, narrow) == ("1.000 (0.777 to 1.287)", "1.000 (0.957 to 1.045)")


def test_the_report_holds_the_table_and_both_plots(tmp_path):
    steps = [[0.1 * i, 64 if 40 <= i < 120 else 1, 1 if 50 <= i < 120 else 7] for i in range(200)]
    load = {"concurrency": 64, "methods": {"target": [ACCOUNT], "fixed 1": [SLOWER]}}
    content = {"rows": rows(), "steps": steps, "accounts": [load]}
    content["provenance"] = {"device": "d", "commit": "c"}
    write_report(tmp_path, content)
    text = (tmp_path / "report.md").read_text()
    assert "| 64 | 1000 | 650 | 980 |" in text
    assert "Rounds until settled, up and down: 8, 0." in text
    assert "| draft K/V, decoding | 0.000 | 0.250 | +25.0% |" in text
    assert "| all | 1.000 | 1.250 | +25.0% |" in text
    assert all((tmp_path / name).read_text().startswith("<svg") for name in ("throughput.svg",))
    assert "width" in (tmp_path / "steps.svg").read_text()


def test_an_account_adds_up_to_a_tokens_time():
    passes = [
        Pass(0.0, 0.4, 0.2, 8, None, 0.1, False),
        Pass(0.5, 1.0, 0.4, 8, 1, 0.05, True),
        Pass(1.1, 1.6, 0.4, 8, 1, 0.05, True),
        Pass(1.7, 2.7, 0.5, 8, 7, 0.2, True),
        Pass(9.0, 9.1, 0.1, 8, 1, 0.0, True),  # after idleness, which is nobody's time
    ]
    found = account(passes, tokens_per_s=100.0)
    assert sum(found[part] for part in PARTS) == pytest.approx(10.0)
    scale = 10.0 / 2.8
    assert found["target, prefills"] == pytest.approx(scale * 0.2)
    assert found["target, decoding"] == pytest.approx(scale * 1.4)
    assert found["draft K/V, decoding"] == pytest.approx(scale * 0.3)
    assert found["rest of decoding"] == pytest.approx(scale * 0.4)
    assert found["between passes"] == pytest.approx(scale * 0.3)
    assert found[OTHER_WIDTHS] == pytest.approx(scale * 1.0)


def test_settling_is_counted_from_the_step():
    steps = [[0, 64, 7]] * 30 + [[0, 64, 1]] * 100
    assert settled_after(steps, 0, 130) in (28, 29, 30)
    assert settled_after([[0, 1, 7]] * 50, 0, 50) == 0


def test_a_closed_loop_keeps_its_number_in_flight_and_counts_tokens():
    flying, most, asked = 0, 0, []

    async def generate(request):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        asked.append(await request.json())
        await asyncio.sleep(0.01)
        flying -= 1
        return web.json_response({"meta_info": {"completion_tokens": 5}})

    load = width_study.Load(4, 16, 1.0)

    async def run() -> float:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        rate = await width_study._closed_loop(f"http://127.0.0.1:{port}", [[1, 2], [3]], load)
        await runner.cleanup()
        return rate

    rate = asyncio.run(run())
    assert most == 4 and len(asked) == load.requests == 32
    assert 0 < rate < 5 * 16 / 0.04
    assert asked[0]["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 16}


def study_options(out, *more: str) -> list[str]:
    example = EXAMPLE / "target"
    command = ["--target", str(example), "--draft", "d", "--out", str(out), *more]
    return command if "--prompts" in more else [*command, "--prompts", str(EXAMPLE / "turns.jsonl")]


@pytest.fixture
def studied(monkeypatch) -> list[str]:
    """Folders that a study was measured into, without a server."""
    found = []

    def run(args, prompts) -> None:
        assert prompts and all(prompts)
        (args.out / "results.json").write_text("{}")
        found.append(args.out.name)

    monkeypatch.setattr(width_study, "study", run)
    return found


def test_a_study_leaves_the_folder_of_another_command_as_it_is(tmp_path, studied, capsys):
    """Found as: --out of a comparison, and its results and report were overwritten."""
    out = tmp_path / "comparison"
    with claim(out, "python -m eval run", {}):
        (out / "results.json").write_text("the comparison's")
    assert width_study.main(study_options(out)) == 2
    error = capsys.readouterr().err
    assert "found that of `python -m eval run`" in error and error.count("\n") == 1
    assert (out / "results.json").read_text() == "the comparison's" and studied == []


def test_a_study_is_measured_anew_by_the_same_command_alone(tmp_path, studied, capsys):
    out = tmp_path / "width"
    assert width_study.main(study_options(out)) == 0
    assert width_study.main(study_options(out)) == 0
    assert width_study.main(study_options(out, "--repeats", "6")) == 2
    assert "repeats was 4, now 6" in capsys.readouterr().err and studied == ["width"] * 2
    with claim(tmp_path / "held", width_study.KIND, {}):
        assert width_study.main(study_options(tmp_path / "held")) == 2


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "holds no prompt"),
        ('{"text": "x"}\n', "p.jsonl:1: expected"),
        ("{\n", "p.jsonl:1: expected a JSON object"),
        (None, "No such file"),
    ],
)
def test_prompts_that_cannot_be_read_are_one_line_before_any_work(
    tmp_path, studied, capsys, content, words
):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    out = tmp_path / "out"
    assert width_study.main(study_options(out, "--prompts", str(path))) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert studied == [] and not out.exists()


def test_prompts_of_several_files_take_turns(tmp_path):
    files = {"a": ["one", "two", "three"], "b": ["four"]}
    for name, turns in files.items():
        (tmp_path / name).write_text("".join(f'{{"turns": ["{turn}"]}}\n' for turn in turns))
    target, paths = str(EXAMPLE / "target"), [tmp_path / name for name in files]
    alone = {path.name: width_study.read_prompts(target, [path], 9) for path in paths}
    found = width_study.read_prompts(target, paths, 3)
    assert found == [alone["a"][0], alone["b"][0], alone["a"][1]]
    assert len(width_study.read_prompts(target, paths, 9)) == 4


def test_experts_that_rows_touch_grow_to_all():
    assert touched(256, 6, 1) == pytest.approx(6)
    assert touched(256, 6, 7) < 42
    assert touched(256, 6, 4096) == pytest.approx(256)


def test_the_plan_is_never_far_below_the_better_and_crosses_over():
    found = plan(roofline(4096), ACCEPTANCE, (1, 64, 1024), (1, 2, 4, 7))
    for row in found:
        assert row["adaptive"] > 0.95 * max(row["none"], row["fixed"]), row
    assert found[0]["fixed"] > found[0]["none"]
    assert found[-1]["fixed"] < found[-1]["none"]
    assert found[0]["width"] > found[-1]["width"]


def test_a_study_s_own_times_give_its_own_rates():
    seconds = measured(rows(), 0.0, ACCEPTANCE)
    assert 1 / seconds(1, 1) == pytest.approx(80)
    assert 64 * expected_tokens(ACCEPTANCE, 7) / seconds(64, 7) == pytest.approx(650)
    assert seconds(1, 1) < seconds(1, 4) < seconds(1, 7)


def test_the_plan_prints_a_study_beside_its_simulation(tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": rows()}))
    width_plan.main(["--study", str(path), "--widths", "1", "7"])
    said = capsys.readouterr().out
    assert "measured adaptive: c 1: " in said
    simulated = [
        float(part.split(": ")[1]) for part in said.strip().split("adaptive: ")[1].split(", ")
    ]
    assert simulated == pytest.approx([1, 1], abs=0.05)
