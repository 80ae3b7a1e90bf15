"""The steps of a visit that start servers. Each finds numbers and checks them."""

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from sglang_hyperdflash.commands.plan_memory import Shape, extra_device_memory, graph_bytes
from sglang_hyperdflash.serving.settings import FULL, RANDOM, WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine.conftest import Servers, greedy, ids, install_plugin
from tests.engine.v4 import controls
from tests.engine.v4.drafts import OWN_DRAFTS
from tests.engine.v4.serve import accepted, known, own_blocks
from tests.gpu import readings, visit
from tests.gpu.kernels import run
from tests.gpu.stage import CPU, GPU, Stage
from tests.gpu.visit import Notes

BLOCK, SHORT = 7, 16
EVERY_WIDTH = (1, 2, 4, 7)
# Draft attention that reads slots, as the CPU platform's does; ``widths`` has the GPU's default.
TRITON_DRAFT_ATTENTION = ("--speculative-draft-attention-backend", "triton")
# With CUDA graphs and without.
GRAPHS = {"graphs": (), "eager": ("--disable-cuda-graph",)}
# Memory of the allocator and of kernels besides the counted buffers, GiB.
SLACK_GIB = 1.5


@dataclass(kw_only=True)
class Visit(Notes):
    stage: Stage
    servers: Servers
    folder: Path  # for files of the visit
    target: Path
    drafter: Path

    @contextmanager
    def server(self, name: str, *arguments: str, draft: Path | None = None, **environment):
        """A server for the length of a ``with`` block; it drafts if ``draft`` is given."""
        stage, place = self.stage, self.folder / f"plugin-{name}"
        place.mkdir()
        if draft is not None:
            arguments = (*arguments, *hyperdflash_arguments(draft))
        # Two runs that are compared have rounds of the same widths.
        environment = {WIDTH: FULL} | environment | stage.environment
        environment |= install_plugin(place, "visit", stage.source)
        given = f"visit-{name}", self.target, *stage.arguments, *stage.sizes, *arguments
        threads = None if stage.gpu else 1
        try:
            yield self.servers.get(*given, environment=environment, threads=threads)
        finally:
            self.servers.stop(f"visit-{name}")

    def plain(self, name: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        with self.server(name) as server:
            return ids(asked(server, prompts, tokens))

    def drafted(self, draft: Path, name: str, prompts, expected, *arguments: str, **environment):
        """Answers of a server whose oracle knows the expected ones, and the drafter's blocks."""
        path = self.folder / f"{name}.jsonl"
        environment |= known(self.folder, prompts, expected) | {OWN_DRAFTS: str(path)}
        with self.server(name, *arguments, draft=draft, **environment) as server:
            results = asked(server, prompts, len(expected[0]))
        return results, own_blocks(path)

    def shape(self) -> Shape:
        """What sizes the buffers of a server of the stage."""
        stage = self.stage
        return Shape(
            requests=stage.requests,
            captured=[stage.requests],
            block=BLOCK,
            widths=[BLOCK],
            residual=int(stage.shape["hc_mult"]) * int(stage.shape["hidden_size"]),
            vocabulary=int(stage.shape["vocab_size"]),
            context=stage.context,
            page=256,
            heads=stage.draft.heads,
            head_dim=stage.draft.head_dim,
            workspace=384 << 20,
        )


def asked(server: Server, prompts: list[list[int]], tokens: int, **sampling) -> list[dict]:
    """Answers of prompts that are in flight together; request ids are ``r0``, ``r1``, ..."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
    rids = [f"r{i}" for i in range(len(prompts))]
    return server.generate(timeout=600, input_ids=prompts, sampling_params=params, rid=rids)


def million(v: Visit) -> None:
    """A server of 1M context and 256 requests: it starts, its bytes are as counted, it answers."""
    v.stage = stage = v.stage.largest()
    with v.server("million", draft=v.drafter) as server:
        log = server.log.read_text(errors="replace")
        slots, size = readings.draft_pool(log)
        shape = stage.draft
        counted = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * slots
        v.measured |= {"draft slots": slots, "draft K/V bytes": size, "counted": counted}
        v.check(abs(size - counted) <= 0.02 * counted + 2**24, "draft K/V bytes are not as counted")
        v.measured["draft attention"] = re.findall(r"HYPERDFLASH: (draft attention is .*)", log)
        _check_graphs(v, log)
        answers = asked(server, stage.prompts(stage.requests), SHORT)
        v.check(all(len(a) == SHORT for a in ids(answers)), "an answer is too short")
        (long,) = stage.prompts(1, seed=1, first=stage.long_prompt)
        answer = greedy(server, long, SHORT)
        v.check(len(answer["output_ids"]) == SHORT, "the long prompt was not answered")


def _check_graphs(v: Visit, log: str) -> None:
    """The graphs' memory against what ``hyperdflash plan`` counts of them."""
    taken, buffers = list(map(float, re.findall(readings.GRAPH, log))), graph_bytes(v.shape())
    v.measured |= {"graphs GiB": taken, "draft attention counted": buffers}
    v.measured["extra device memory"] = extra_device_memory(v.shape())
    if not v.stage.gpu:
        return
    v.check(len(taken) >= 2, "the log names no graphs of target and draft")
    most = max(buffers.values()) / 2**30 + SLACK_GIB
    v.check(not taken or taken[-1] <= most, f"the draft's graphs take more than {most:.1f} GiB")
    v.check(not readings.fell_back(log), "a fused path fell back")
    ready = "reducer=hc_gate kernels=triton fused_kv=True"
    v.check(ready in log, f"the log does not say: {ready}")


def tiny(v: Visit) -> None:
    """The tiny pair: graphs, rounds without them, every width with new weights; training."""
    # SGLang's Triton attention needs no compiler; FlashInfer's would take minutes.
    chosen = ("graphs1-triton", "graphs0-triton", "new_weights and random", "losses_and_gradients")
    for number, part in enumerate(chosen):
        run(v, f"tiny_{number}", "-m", "pytest", "-q", "tests/gpu", "-k", part)


def windowed(v: Visit) -> None:
    """A windowed drafter proposes the same blocks with CUDA graphs and without."""
    draft = v.stage.write_drafter(v.folder / "windowed", v.stage.window)
    prompts = v.stage.prompts(4)
    expected, blocks = v.plain("windowed-none", prompts, v.stage.tokens), []
    for graphs, options in GRAPHS.items():
        results, drafts = v.drafted(draft, f"windowed-{graphs}", prompts, expected, *options)
        v.measured[f"rounds by accepted drafts, {graphs}"] = accepted(results)
        blocks.append(drafts)
    _check_same_drafts(v, *blocks)


def _check_varied(v: Visit, blocks: list[list[int]], kind: str = "") -> None:
    distinct = len(set(map(tuple, blocks)))
    v.check(3 * distinct > len(blocks), f"the drafter repeats its blocks{kind}")


def _check_same_drafts(v: Visit, one: dict, other: dict, drafts=BLOCK - 1, kind: str = "") -> None:
    """Two runs, with graphs and without, propose the same blocks for the same text."""
    one, other = (
        {(*key, anchor): block for key, (anchor, block) in run.items() if len(block) == drafts}
        for run in (one, other)
    )
    both = one.keys() & other.keys()
    same = sum(one[key] == other[key] for key in both)
    v.measured[f"blocks{kind}"] = {"compared": len(both), "equal": same}
    v.check(len(both) >= 10, f"too few blocks of the same text to compare{kind}")
    _check_varied(v, list(one.values()), kind)
    # bf16 rounds by the number of rows, so a near-tie may differ; garbage differs everywhere.
    v.check(same >= 0.8 * len(both), f"graphs and eager rounds draft different blocks{kind}")


def _check_tokens(v: Visit, tokens: list[list[int]], expected: list[list[int]], kind: str) -> None:
    """Answers are the expected ones, on a GPU until a tie of one bf16 step."""
    pairs = [list(zip(x, y, strict=False)) for x, y in zip(tokens, expected, strict=True)]
    same = [next((i for i, (a, b) in enumerate(p) if a != b), len(p)) for p in pairs]
    v.measured[f"tokens until the first difference{kind}"] = same
    needed = 8 if v.stage.gpu else min(len(answer) for answer in expected)
    v.check(sorted(same)[len(same) // 2] >= needed, f"answers leave the target's at once{kind}")


def residual(v: Visit) -> None:
    """Tokens of no speculation at every length of acceptance, until a tie of one bf16 step."""
    prompts = v.stage.prompts(8 if v.stage.gpu else 2)
    expected = v.plain("plain", prompts, v.stage.tokens)
    results, blocks = v.drafted(v.drafter, "oracle", prompts, expected, *TRITON_DRAFT_ATTENTION)
    _check_varied(v, [block for _, block in blocks.values()])
    _check_tokens(v, ids(results), expected, "")
    v.measured["rounds by drafts"] = accepted(results)
    # Then most blocks are the drafter's own: the oracle no longer knows the text.
    v.check(sum(map(bool, accepted(results))) >= 3, "too few lengths of acceptance")


def widths(v: Visit) -> None:
    """A width drawn every round: tokens of no speculation; each width drafts alike in graphs."""
    prompts, blocks = v.stage.prompts(4), []
    expected = v.plain("widths-none", prompts, 2 * v.stage.tokens)
    drawn = {WIDTH: RANDOM, WIDTHS: ",".join(map(str, EVERY_WIDTH))}
    for name, options in GRAPHS.items():
        given = v.drafter, f"widths-{name}", prompts, expected, *options
        results, drafts = v.drafted(*given, **drawn)
        _check_tokens(v, ids(results), expected, f", {name}")
        rounds = readings.rounds_by_width(results)
        v.measured[f"rounds by width, {name}"] = rounds
        v.check(set(rounds) == set(EVERY_WIDTH), f"not every width ran, {name}")
        blocks.append(drafts)
    for width in EVERY_WIDTH[1:]:
        _check_same_drafts(v, *blocks, drafts=width - 1, kind=f" of width {width}")


def poison(v: Visit) -> None:
    """Nothing reads what rejected drafts left in the target's states: they are set to NaN."""
    prompts, tokens = v.stage.prompts(4, first=v.stage.boundary), v.stage.tokens
    expected = v.plain("poison-none", prompts, tokens)
    fault = {controls.FAULT: controls.poison_rejected_states.__name__}
    results, _ = v.drafted(v.drafter, "poison-rejected", prompts, expected, **fault)
    v.measured["rounds by drafts"] = accepted(results)
    v.check(all(len(answer) == tokens for answer in ids(results)), "an answer was cut short")
    _check_tokens(v, ids(results), expected, "")
    # The control: what a boundary does read, set to NaN too, must be seen.
    fault = {controls.FAULT: controls.poison_an_accepted_state.__name__}
    try:
        answers, _ = v.drafted(v.drafter, "poison-accepted", prompts, expected, **fault)
        seen = ids(answers) != ids(results)
    except requests.RequestException:
        seen = True
    v.measured["an accepted state set to NaN is seen"] = seen
    v.check(seen, "NaN in a state that is read changed nothing: the poison reaches no state")


def trace(v: Visit) -> None:
    """No host wait inside the rounds of a batch, by SGLang's profiler."""
    folder, rounds = v.folder / "trace", 8
    folder.mkdir()
    activities = ["CPU", "GPU"] if v.stage.gpu else ["CPU"]
    # SGLang's newer profiler can leave prefills out, which wait. Two traces in one process end it:
    # torch's profiler breaks while Python collects what the second one left.
    with v.server("trace", draft=v.drafter, SGLANG_PROFILE_V2="1") as server:
        asked(server, v.stage.prompts(4), SHORT)
        options = {"output_dir": str(folder), "num_steps": rounds, "activities": activities}
        options |= {"profile_by_stage": True, "profile_stages": ["decode"]}
        requests.post(f"{server.url}/start_profile", json=options, timeout=60).raise_for_status()
        asked(server, v.stage.prompts(4), v.stage.tokens)
    seen, events = readings.rounds_of(readings.trace_events(folder))
    waits = Counter(e["name"] for e in events if e.get("name") in readings.WAITS)
    v.measured |= {"rounds": seen, "events": len(events), "waits": dict(waits)}
    v.check(rounds - 1 <= seen <= rounds + 1, f"the trace has not {rounds} rounds")
    # The scheduler itself waits once a round, for the tokens of the round before.
    waits -= Counter(cudaEventSynchronize=seen)
    v.check(not waits, f"the host waits inside a round: {dict(waits)}")


def sampled(v: Visit) -> None:
    """Peak memory of a full sampled batch against what is counted for its verification."""
    stage = v.stage
    prompts = [prompt[:32] for prompt in stage.prompts(stage.requests)]
    limits = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
    with v.server("sampled", draft=v.drafter) as server:
        asked(server, prompts[:2], SHORT, **limits)
        work = asked, server, prompts, 4 * SHORT
        before, most = readings.used_while(server.process.pid, *work, **limits)
    counted = extra_device_memory(v.shape())["verification of sampled requests"]
    v.measured |= {"before": before, "peak": most, "counted": counted}
    # The start's rehearsal has left the allocator what it needs, so little may come on top.
    v.check(most - before <= counted + SLACK_GIB * 2**30, "a sampled batch takes more than counted")


def walk(names: list[str], folder: Path, out: Path, small: bool, minutes: float) -> dict:
    """Steps with servers, and others; every server that they started ends."""
    stage, servers = CPU if small else GPU, Servers()
    target, drafter = stage.write_target(folder / "target"), stage.write_drafter(folder / "drafter")
    given = {"stage": stage, "servers": servers, "folder": folder, "out": out, "gpu": stage.gpu}

    def notes(_: str) -> Visit:
        servers.stop_all()  # of a step that was ended
        return Visit(**given, target=target, drafter=drafter)

    try:
        return visit.run(names, notes, out, small, minutes)
    finally:
        servers.stop_all()
