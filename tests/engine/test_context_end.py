"""Answers that fill the context are the baseline's; no row past its end reaches a model."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from sglang_hyperdflash.serving.settings import POOL_RATIO, WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from tests.engine import probes
from tests.engine.asking import HOT, post
from tests.engine.conftest import FP32, VOCABULARY_ORDER, greedy, install_plugin, probed
from tests.engine.drafters import with_config, with_window

# Of ``short_target``: one position more and its rotary table has no row.
CONTEXT = 160
# More letters than fit: an answer under this grammar never ends by itself.
ENDLESS = "[a-z ]{1500}"


@pytest.fixture(scope="module")
def short_target(target_dir, tmp_path_factory) -> Path:
    """The tiny target with a context of ``CONTEXT`` tokens."""
    folder = tmp_path_factory.mktemp("short") / "target"
    return with_config(target_dir, folder, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def end_prompts(own_prompts) -> list[list[int]]:
    """Twelve prompts longer than the context; what is asked are their first tokens."""
    text = [token for prompt in own_prompts for token in prompt]
    return [(text[17 * i :] + text)[:CONTEXT] for i in range(12)]


def payloads(prompts: list[list[int]]) -> list[dict]:
    """Greedy, seeded and constrained requests, short or long, that leave 0 to 8 context tokens."""
    found = []
    for left in range(9):
        rooms = [CONTEXT - 40] * 2 + list(range(max(left, 1), 13))
        for number, room in enumerate(rooms):
            i = len(found)
            sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": room - left}
            if i % 2:
                sampling |= {"temperature": HOT, "sampling_seed": i}
            if (i // 2 + number) % 2:
                sampling["regex"] = ENDLESS
            prompt = prompts[i % len(prompts)][: CONTEXT - room]
            found.append({"input_ids": prompt, "sampling_params": sampling})
    return found


def answer(server: Server, payload: dict) -> tuple:
    """Tokens of an answer, streamed if the payload says so, and why it ended; or the refusal."""
    reply = post(server, "/generate", payload)
    if reply.status_code != 200:
        return (reply.status_code,)
    *_, last = [line for line in reply.text.splitlines() if "{" in line]
    told = json.loads(last.removeprefix("data: "))
    end = told["meta_info"]["finish_reason"]
    # A stream has begun by the time that the scheduler refuses.
    return (end["status_code"],) if end["type"] == "abort" else (told["output_ids"], end)


def answers(server: Server, asked: list[dict], at_once: int) -> list[tuple]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda payload: answer(server, payload), asked))


@pytest.fixture(scope="module")
def short_baseline(servers, short_target, end_prompts, tmp_path_factory) -> Callable:
    """What the baseline answers, of a server with these options."""
    plugin = install_plugin(tmp_path_factory.mktemp("plugin"), "vocabulary_order", VOCABULARY_ORDER)

    @cache
    def ask(*options: str) -> list[tuple]:
        options = (*FP32, "--enable-deterministic-inference", *options)
        server = servers.get("end-baseline", short_target, *options, environment=plugin)
        told = answers(server, payloads(end_prompts), 8)
        servers.stop("end-baseline")
        # SGLang ends an answer two tokens before its context's end.
        assert max(len(a[0]) for a in told if len(a) > 1) == CONTEXT - 42
        assert {a[0] for a in told if len(a) == 1} <= {400}
        return told

    return ask


@pytest.mark.xdist_group("pair")
def test_prompts_at_the_context_limit(
    target_server, hyper_server, own_prompts, own_reference, probe_folder
):
    """On the servers that run already: the last prompts that are taken, and the first refused."""
    context = 2048
    base, asked = [token for prompt in own_prompts for token in prompt] * 20, []
    for left in (9, 7, 2, 1):
        for temperature in (0, HOT):
            sampling = {"temperature": temperature, "sampling_seed": left, "ignore_eos": True}
            sampling["max_new_tokens"] = None
            asked.append({"input_ids": base[: context - left], "sampling_params": sampling})
    both = [  # what the first computes, the others have cached
        answers(server, asked[:1], 1) + answers(server, asked[1:], 7)
        for server in (target_server, hyper_server)
    ]
    assert both[0] == both[1] and max(map(len, both[0])) == 2
    for name, ends in json.loads((probe_folder / "positions.json").read_text()).items():
        assert ends[0] < context and ends[1] <= context, (name, ends)
    assert greedy(hyper_server, own_prompts[0])["output_ids"] == own_reference[0]


# Draft's window, arguments, environment.
EVERY = {WIDTHS: "1,2,3,4,5,6,7"}
FORMS = {
    "as it is": (None, (), {}),
    **{f"width {width}": (None, (), {WIDTH: width}) for width in "1234567"},
    **{width: (None, (), {WIDTH: width, **EVERY}) for width in ("random", "adaptive")},
    "truncated": (None, ("--allow-auto-truncate",), {}),
    "synchronous": (None, ("--disable-overlap-schedule",), {}),
    "chunked": (None, ("--chunked-prefill-size", "64"), {}),
    "window": (32, (), {POOL_RATIO: "0.05"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_answers_to_the_end_of_the_context(
    servers, short_target, drafter_dir, end_prompts, short_baseline, tmp_path, form
):
    window, options, environment = FORMS[form]
    expected, asked = short_baseline(*options), payloads(end_prompts)
    draft = with_window(drafter_dir, tmp_path / "draft", window)
    arguments = (*FP32, *options, *hyperdflash_arguments(draft))
    environment = environment | probed(tmp_path, probes.POSITIONS)
    server = servers.get("end-hyper", short_target, *arguments, environment=environment)
    try:
        assert answers(server, asked, 8) == expected
        streamed = [payload | {"stream": True} for payload in asked[::5]]
        assert answers(server, streamed, 1) == expected[::5]
        for payload in asked:
            payload["sampling_params"].pop("sampling_seed", None)
        unseeded = answers(server, asked[1::6], 8)
        same = zip(unseeded, expected[1::6], strict=True)
        assert all(len(a[0]) == len(b[0]) for a, b in same if len(b) > 1)
        most = json.loads((tmp_path / "positions.json").read_text())
    finally:
        servers.stop("end-hyper")
    for name, (position, end) in most.items():
        assert position < CONTEXT and end <= CONTEXT, (name, position, end)
    # The last row that answers a token is there.
    assert most["target"][0] >= CONTEXT - 4, most
