"""Real SGLang servers, started once a session and shared.

``xdist_group`` names the servers that a test needs: one worker runs the whole group. ``pair`` comes
first, since others read what its baseline answers.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import requests
import torch
from filelock import FileLock

from eval.identity import TIE_GAPS
from sglang_hyperdflash.serving.capture_rows import REQUEST_PREFIX, RowReader
from sglang_hyperdflash.serving.settings import FULL, WIDTH
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)
from tests.conftest import BENCHMARKS, EXAMPLE, ROOT
from tests.engine import probes
from tests.engine.asking import CASES, case_answers
from tests.waiting import PATIENCE, until
from tests.warm_start.client import start

# Too little K/V for eight requests: some go back to the queue.
SMALL_POOL = ("--max-total-tokens", "900", "--schedule-conservativeness", "0.01")
# A tiny model left free would fill a JSON answer with white space up to its length limit.
SHORT_JSON = "--constrained-json-disable-any-whitespace"
COMMON = ("--sleep-on-idle", "--log-level", "info", SHORT_JSON)
FP32 = ("--dtype", "float32", *comparable_arguments(32768, "info"), SHORT_JSON)
# Of a kind that constrains a call from its first token; the tiny target never begins one itself.
TOOL_CALLS = ("--tool-call-parser", "pythonic")
# ``/health`` says what SGLang knows, and does not wait a second for a token of its own.
AT_ONCE = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
NEW_TOKENS = 64
# Two runs batch otherwise, and each rounds in its own way.
BF16_TIE = TIE_GAPS["bfloat16"]
PAIR = "pair"
GROUP = pytest.StashKey[str]()


def group_of(item) -> str:
    (mark,) = item.iter_markers("xdist_group")
    return mark.args[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.get_closest_marker("xdist_group") is None:  # as --dist loadfile
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    waiting = {group_of(item) for item in items if "baseline" in item.fixturenames}

    def place(item) -> int:
        """The baseline's group, what starts cold, what waits for the baseline, the rest."""
        path, group = str(item.path), group_of(item)
        cold = "tests/unit/test_" in path or "tests/engine" in path
        return 0 if group == PAIR else 2 if group in waiting else 1 if cold else 3

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    item.config.stash[GROUP] = group_of(item)


class Servers:
    """Starts servers by name on first use and stops them all at the end."""

    def __init__(self) -> None:
        self.running: dict[str, Server] = {}

    def get(self, name: str, model: Path, *arguments: str, **options) -> Server:
        # No test can foresee widths that follow load; a run may ask for them all the same.
        whole = {WIDTH: os.environ.get(WIDTH, FULL)}
        options["environment"] = AT_ONCE | whole | options.get("environment", {})
        # Metrics begin with the first request: there tests count on SGLang's own.
        if "--enable-metrics" not in arguments:
            arguments += ("--skip-server-warmup",)
        if name not in self.running:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            log = ROOT / "build" / "test-logs" / worker / f"{name}.log"
            # Servers add to their log; a test must not read what an earlier run said.
            log.unlink(missing_ok=True)
            self.running[name] = Server(model, *arguments, log=log, start=start, **options)
        return self.running[name].wait(PATIENCE)

    def stop(self, name: str) -> None:
        # SGLang takes longer to end by itself than we would wait.
        self.running.pop(name).stop(patience=0)

    def stop_all(self) -> None:
        for name in list(self.running):
            self.stop(name)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    pool = Servers()
    yield pool
    pool.stop_all()


# SGLang keys its noise by rank as soon as a seeded request filters; here it draws by vocabulary id.
VOCABULARY_ORDER = """
def draw(original, self, probs, info, positions, simple):
    import torch

    from tests.target_probabilities import target_probabilities
    from triton_ops.gumbel import gumbel_noise

    if simple:
        return original(self, probs, info, positions, simple)
    ones = torch.ones(len(probs))
    top_ps = info.top_ps.masked_fill(info.top_ps >= 1, 2.0)
    distribution = target_probabilities(probs.log(), ones, info.top_ks, top_ps, info.min_ps)
    noise = gumbel_noise(info.sampling_seed, positions, torch.arange(probs.shape[1]))
    return (distribution.double().log() + noise).argmax(-1), None


def load():
    from sglang_hyperdflash.seams import when_imported

    when_imported("sglang.srt.layers.sampler", patch)


def patch():
    from sglang.srt.layers.sampler import Sampler

    original = Sampler._sample_from_probs
    Sampler._sample_from_probs = lambda self, *inputs: draw(original, self, *inputs)
"""
PROCESSORS = "--enable-custom-logit-processor"
# Every request has a seed, and the host always knows the last token.
DETERMINISTIC = ("--enable-deterministic-inference", "--disable-overlap-schedule", PROCESSORS)


@pytest.fixture(scope="session")
def target_server(servers, target_dir, tmp_path_factory) -> Server:
    """The baseline, fp32, deterministic."""
    environment = install_plugin(tmp_path_factory.mktemp("plugin"), "order", VOCABULARY_ORDER)
    arguments = (*FP32, *TOOL_CALLS, *DETERMINISTIC, "--enable-return-hidden-states")
    return servers.get("target", target_dir, *arguments, environment=environment)


@pytest.fixture(scope="session")
def probe_folder(tmp_path_factory) -> Path:
    """Where ``hyper_server`` writes down what it does."""
    return tmp_path_factory.mktemp("probes")


def probed(folder: Path, *names: str) -> dict[str, str]:
    """The environment of a server that writes what ``probes`` has, or these parts, to a folder."""
    environment = install_plugin(folder, "probes", probes.PLUGIN)
    return environment | {name: str(folder / probes.FILES[name]) for name in names or probes.FILES}


@pytest.fixture(scope="session")
def hyper_server(servers, target_dir, drafter_dir, probe_folder, baseline) -> Server:
    """HYPERDFLASH, fp32, whole blocks, overlap scheduling on, radix cache on, metrics on."""
    arguments = (*FP32, *TOOL_CALLS, "--enable-metrics", "--random-seed", "7")
    arguments += hyperdflash_arguments(drafter_dir)
    return servers.get("hyper", target_dir, *arguments, environment=probed(probe_folder))


@pytest.fixture(scope="session")
def tokenizer(target_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_dir)


def chat_ids(tokenizer, messages: list[dict]) -> list[int]:
    """Prompt tokens of a conversation."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="session")
def own_prompts(tokenizer) -> list[list[int]]:
    """The twelve prompts of the demo, as tokens."""
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()
    return [chat_ids(tokenizer, json.loads(line)["messages"]) for line in lines]


def held_out_problems(count: int) -> list[list[dict]]:
    """Problems that the tiny target was never trained on, of every family."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        from exchanges import FAMILIES, FIRST_HELD_OUT_SEED, generate

        per_family = -(-count // len(FAMILIES))
        return [e.prompt for e in generate(FIRST_HELD_OUT_SEED, per_family)][:count]


@pytest.fixture(scope="session")
def benchmark_prompts(tokenizer) -> list[list[int]]:
    """Sixty prompts as tokens: of benchmarks, or held-out problems where there are none."""
    chats = [] if BENCHMARKS else held_out_problems(60)
    for name in ("gsm8k", "humaneval", "mt-bench") if BENCHMARKS else ():
        for line in (BENCHMARKS / f"{name}.jsonl").read_text().splitlines()[:20]:
            chats.append([{"role": "user", "content": json.loads(line)["turns"][0]}])
    return [chat_ids(tokenizer, messages)[:1400] for messages in chats]


def install_plugin(folder: Path, name: str, source: str) -> dict[str, str]:
    """The environment of a server with one more SGLang plugin; ``source`` defines ``load``."""
    (folder / f"{name}_plugin.py").write_text(source)
    info = folder / f"{name}_plugin-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 0\n")
    entry = f"[sglang.srt.plugins]\n{name} = {name}_plugin:load\n"
    (info / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


# Admit requests as if each would generate eight tokens only. SGLang reads its variable for it,
# SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, while it is imported: too late for a warm start.
OPTIMISTIC = """
def load():
    from sglang.srt.managers import schedule_policy

    assert schedule_policy.CLIP_MAX_NEW_TOKENS == 4096
    schedule_policy.CLIP_MAX_NEW_TOKENS = 8
"""


def greedy(server: Server, prompt: list[int], max_new_tokens: int = NEW_TOKENS, **options) -> dict:
    """One temperature-0 answer of a fixed length."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    sampling |= options.pop("sampling", {})
    return server.generate(input_ids=prompt, sampling_params=sampling, **options)


def conversation(server: Server, turns: list[list[int]], tokens: int) -> list[dict]:
    """Greedy answers of so many tokens; each turn follows the answers before it."""
    context, answers = [], []
    for turn in turns:
        context = context + turn
        answers.append(greedy(server, context, tokens))
        context = context + answers[-1]["output_ids"]
    return answers


def reused(answers: list[dict]) -> list[tuple[int, int]]:
    """Prompt tokens of each answer, and how many of them were cached."""
    each = [answer["meta_info"] for answer in answers]
    return [(one["prompt_tokens"], one["cached_tokens"]) for one in each]


def flush(server: Server) -> None:
    """Empty the prefix cache, once the last answer's batch has ended too."""
    asked = {"params": {"timeout": PATIENCE}, "timeout": PATIENCE}
    requests.post(f"{server.url}/flush_cache", **asked).raise_for_status()


def captured_prefill(server: Server, tokens: list[int], folder: Path) -> tuple[torch.Tensor, int]:
    """The residual ``[S, m*d]`` that an engine computed of uncached ``tokens``, and its next token.

    The server was started with ``CAPTURE_FOLDER`` at ``folder`` and returns hidden states.
    """
    rid = f"{REQUEST_PREFIX}0-0"
    answer = greedy(server, tokens, 1, return_hidden_states=True, rid=rid)
    rows = asyncio.run(RowReader(folder).take(rid, len(tokens)))
    return rows, answer["output_ids"][0]


def retractions(server: Server) -> int:
    """How often its log says that requests went back to the queue."""
    return server.log.read_text(errors="replace").count("Retract requests")


def greedy_all(
    server: Server, prompts: list[list[int]], concurrency: int, ask: Callable = greedy
) -> list[dict]:
    """Every prompt's answer, ``concurrency`` of them in flight at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), prompts))


def greedy_together(server: Server, prompts: list[list[int]]) -> list[dict]:
    """As :func:`greedy_all`, by one call: they share batches however slow a client is."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return server.generate(timeout=PATIENCE, input_ids=prompts, sampling_params=sampling)


def ids(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="session")
def baseline(request, own_prompts, tmp_path_factory) -> dict[str, list]:
    """What the baseline answers to every case, and to the demo prompts: "own"; "long", 96 tokens.

    The worker of the group ``pair`` asks, if it runs; the others wait for what it writes.
    """
    root, several = tmp_path_factory.getbasetemp(), "PYTEST_XDIST_WORKER" in os.environ
    path = (root.parent if several else root) / "baseline.json"
    others = several and request.config.stash[GROUP] != PAIR
    if others and any(group_of(item) == PAIR for item in request.session.items):
        until(path.is_file)
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            server = request.getfixturevalue("target_server")
            # Deterministic inference gives the same whatever the batch.
            told = case_answers(server, CASES, own_prompts, 64)
            long = ids(greedy_all(server, own_prompts, 12, partial(greedy, max_new_tokens=96)))
            told |= {"long": long, "own": [tokens[:NEW_TOKENS] for tokens in long]}
            write_json(path, told)
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def own_reference(baseline) -> list[list[int]]:
    """The baseline's greedy tokens of the demo prompts."""
    return baseline["own"]


def first_difference_gaps(
    target_dir: Path, prompts: list[list[int]], expected: list[list[int]], found: list[list[int]]
) -> list[float]:
    """The fp32 logit gap between the two tokens at each answer's first difference."""
    from sglang_hyperdflash.training.local_target import LocalTarget

    target, gaps = LocalTarget(target_dir), []
    for prompt, a, b in zip(prompts, expected, found, strict=True):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = target.lm_head(target.features(torch.tensor([prompt + a[:at]]))[0][0, -1])
        gaps.append(float((logits[a[at]] - logits[b[at]]).abs()))
    return gaps
