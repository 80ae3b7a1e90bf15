"""What ``python -m eval.demo`` prints."""

import os
import sys
from pathlib import Path
from typing import Any

# Who answers, by the names of ``eval.methods`` where it has one.
BASELINE, NOISE, DRAFTED, CONTROL = "baseline", "baseline-again", "hyperdflash2", "random-drafter"
LABELS = {
    BASELINE: "baseline",
    NOISE: "baseline again (noise)",
    DRAFTED: "HyperDFlash-2",
    CONTROL: "random drafter (control)",
}
OTHER = "other text"
PROMPTS = "held-out problems of the kinds that target and drafter were trained on; one other text"
YOURS = "yours; the target knows 21 kinds of small problems, and answers others with nonsense"
HEAD = """\
HyperDFlash on a DeepSeek-V4 of 6.5M parameters that this project trained, served by SGLang
  compared  greedy answers with and without HyperDFlash-2, token by token; whole requests, in turns
  prompts   {prompts}
  tau       accept length: tokens for each pass of the target. The baseline has 1, and 7 is the
            most: six accepted drafts and the bonus token, which is the target's own.
  control   the same drafter with random weights: the same answers, a tau of about 1, slower
  takes     one or two minutes on two idle cores
  files     report {out}, servers' logs {logs}
"""
MACHINE = "{device}; SGLang {sglang}, torch {torch}"
BUSY = "WARNING: load average {load_average:.1f} on {cores} cores: the speeds will be distorted."
COLUMNS = "                        baseline     HyperDFlash-2  speedup   tau  control  answers"
ROUNDS = 16  # of an answer, to print
STYLES = {"accepted": "32", "bonus": "1", "rejected": "31;9"}  # green, bold, red struck through
TAIL = """
report  {out} (all token ids and texts, to compare yourself); logs {logs}
next    ask it yourself:  {python} -m eval.demo --prompt "Add 12 and 30."
        serve it:         HYPERDFLASH_CPU=1 {python} -m sglang.launch_server ... (README.md)
        see one learn:    make learn-demo (in a clone)
        train one:        docs/training.md"""


def print_head(out: Path, logs: Path, own: bool) -> None:
    """Print what is compared; ``own``: the demo's own prompts."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    print(HEAD.format(prompts=PROMPTS if own else YOURS, out=out, logs=logs), flush=True)


def print_tail(out: Path, logs: Path) -> None:
    """Print where the report is and what to do next, with the Python that runs."""
    print(TAIL.format(out=out, logs=logs, python=os.path.relpath(sys.executable)))


def one_line(text: str, width: int, *, end: bool = False) -> str:
    """Return a text's start, or its end, in one line."""
    line = " / ".join(filter(None, map(str.strip, text.splitlines())))
    cut = f"...{line[3 - width :]}" if end else f"{line[: width - 3]}..."
    return cut if len(line) > width else line


def print_entry(number: int, entry: dict[str, Any]) -> None:
    """Print a prompt's numbers, and below them its question and answer."""
    servers, line = entry["servers"], f"{number:2} {entry['kind']:13}"
    drafted, control = servers[DRAFTED], servers[CONTROL]
    for server in (servers[BASELINE], drafted):
        line += f"{server['seconds']:7.2f} s {server['tokens'] / server['seconds']:4.0f}/s"
    line += f"{drafted['speedup']:8.2f}x{drafted['tau']:6.2f}{control['tau']:9.2f}  "
    verdicts = {LABELS[name]: server["verdict"] for name, server in servers.items()}
    differ = (f"{v.upper()}: {name}" for name, v in verdicts.items() if v != "identical")
    print(line + (", ".join(differ) or "identical"))
    text = one_line(drafted["answers"][0]["texts"][-1], 40, end=True)
    if entry["right"] is False:
        same = "" if drafted["verdict"] == "fault" else ", as the baseline's"
        text += f"  (wrong{same}; expected {one_line(entry['expected'], 30)})"
    width = max(30, 93 - len(text)) // len(entry["turns"])
    question = " / ".join(one_line(turn, width) for turn in entry["turns"])
    print(f"   {question} -> {text}", flush=True)


def print_rounds(question: str, rounds: list[dict[str, str]]) -> None:
    """Print an answer's first rounds: accepted drafts, the bonus token, rejected drafts."""
    print(f"\nThe first rounds of the answer to {one_line(question, 60)!r}, spaces as dots:")
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    coloured = sys.stdout.isatty() and not plain
    print(f"  {'round':7} {'[accepted drafts] bonus token':43} rejected drafts")
    for number, texts in enumerate(rounds[:ROUNDS]):
        parts = {name: repr(text)[1:-1].replace(" ", "·") for name, text in texts.items()}
        gap = " " * (40 - len(parts["accepted"] + parts["bonus"]))
        if coloured:
            parts = {name: f"\033[{STYLES[name]}m{part}\033[0m" for name, part in parts.items()}
        line = f"[{parts['accepted']}] {parts['bonus']}{gap} {parts['rejected']}".rstrip()
        print(f"  {number or 'prefill':<7} {line}")
    note = "drafts are recomputed, and as many of them accepted as the server counted"
    print(f"  ({note if rounds else 'not shown: recomputed in fp32, they differ'})")


def print_summary(result: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Print the numbers over all prompts."""
    other = [entry["servers"][DRAFTED]["tau"] for entry in entries if entry["kind"] == OTHER]
    title = f"{len(entries) - len(other)} prompts"
    print(f"\n{title:26}{'tau':>5}{'tokens/s':>10}  {'speedup: median (range)':25}same tokens")
    for name, server in result["servers"].items():
        low, median, high = server["speedup"]
        speedup = f"{median:.2f}x ({low:.2f}x to {high:.2f}x)" if name != BASELINE else ""
        line = f"{LABELS[name]:26}{server['tau']:5.2f}{server['tokens_per_second']:10.0f}  "
        print(f"{line}{speedup:25}{server['verdicts']['identical']} of {len(entries)}")
    for tau in other:
        print(f"Other text, unlike the drafter's training data: tau {tau:.2f}, in no average.")
    judged = [entry["right"] for entry in entries if entry["right"] is not None]
    rights = f"Right answers: {sum(judged)} of {len(judged)}." if judged else ""
    counted = f"{result['faults']} faults, {result['ties']} ties"
    print(f"Differences: {counted} in {result['provenance']['dtype']}. {rights}")
    print("Tau and answers repeat exactly, the speed does not.")
