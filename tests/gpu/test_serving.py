"""The tiny pair on a CUDA device: draft attention, CUDA graphs and verification kernels.

Run with ``make gpu-test``; without a GPU the same paths are tested on the CPU platform.
"""

from functools import partial

import pytest
import torch

from sglang_hyperdflash.serving.settings import WIDTH, WIDTHS
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.asking import HOT
from tests.engine.conftest import BF16_TIE, first_difference_gaps, greedy, greedy_all, ids
from tests.engine.drafters import with_head
from tests.engine.test_weight_updates import update
from tests.gpu.readings import fell_back, rounds_by_width

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# flashinfer has no attention sinks, which the target needs; the draft has none.
ARGUMENTS = ("--dtype", "bfloat16", "--attention-backend", "triton", "--mem-fraction-static", "0.3")


@pytest.fixture(scope="module")
def expected(servers, target_dir, own_prompts):
    plain = servers.get("gpu-target", target_dir, *ARGUMENTS, threads=None)
    answers = ids(greedy_all(plain, own_prompts, 4))
    servers.stop("gpu-target")
    return answers


@pytest.fixture
def check(target_dir, own_prompts, expected):
    """Answers are the target's until a tie, and drafts were accepted."""

    def checked(answers: list[dict]) -> None:
        gaps = first_difference_gaps(target_dir, own_prompts, expected, ids(answers))
        assert all(gap < BF16_TIE for gap in gaps), gaps
        assert sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers) > len(answers)

    return checked


@pytest.mark.parametrize("draft_backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("graphs", [(), ("--disable-cuda-graph",)])
def test_greedy_differs_only_at_ties(
    servers, target_dir, drafter_dir, own_prompts, check, draft_backend, graphs
):
    name = f"gpu-{draft_backend}-{'eager' if graphs else 'graphs'}"
    backend = ("--speculative-draft-attention-backend", draft_backend)
    arguments = (*ARGUMENTS, *graphs, *hyperdflash_arguments(drafter_dir), *backend)
    server = servers.get(name, target_dir, *arguments, threads=None)
    answers = greedy_all(server, own_prompts, 4)
    servers.stop(name)
    check(answers)
    log = server.log.read_text(errors="replace")
    assert not fell_back(log), "a fused path fell back"
    assert "reducer=hc_gate kernels=triton fused_kv=True" in log


@pytest.mark.parametrize("mode", ["random", "adaptive"])
def test_graphs_of_every_width_survive_new_weights(
    servers, target_dir, drafter_dir, own_prompts, check, mode
):
    """The same weights again, and all graphs recaptured in the middle of narrow rounds."""
    name, environment = f"gpu-weights-{mode}", {WIDTH: mode, WIDTHS: "1,2,4,7"}
    arguments = (*ARGUMENTS, *hyperdflash_arguments(drafter_dir))
    server = servers.get(name, target_dir, *arguments, environment=environment, threads=None)
    answers = [greedy_all(server, own_prompts, 4)]
    for _ in range(2):
        reply = update(server, target_dir)
        assert reply.status_code == 200, reply.text
        answers.append(greedy_all(server, own_prompts, 4))
    log = server.log.read_text(errors="replace")
    servers.stop(name)
    widths = rounds_by_width([answer for part in answers for answer in part])
    assert set(widths) == {1, 2, 4, 7} if mode == "random" else len(widths) > 1, widths
    assert "without a CUDA graph" not in log and not fell_back(log)
    for part in answers:
        check(part)


@pytest.mark.parametrize("causal", [False, True], ids=["whole block", "causal"])
def test_a_dependency_head_drafts_the_same_inside_the_graph(
    servers, target_dir, drafter_dir, own_prompts, check, tmp_path, causal
):
    """Greedy and seeded rounds, from the graph's buffers and without any graph."""
    folder = with_head(drafter_dir, tmp_path / "draft", causal=causal)
    sample = partial(greedy, max_new_tokens=64, sampling={"temperature": HOT, "sampling_seed": 7})
    correct = []
    for graphs in ((), ("--disable-cuda-graph",)):
        name = f"gpu-head-{'eager' if graphs else 'graphs'}"
        arguments = (*ARGUMENTS, *graphs, *hyperdflash_arguments(folder))
        server = servers.get(name, target_dir, *arguments, threads=None)
        runs = [greedy_all(server, own_prompts, 1), greedy_all(server, own_prompts, 1, sample)]
        servers.stop(name)
        assert "head=rank 128, K 64" in server.log.read_text(errors="replace")
        check(runs[0])
        correct.append([sum(a["meta_info"]["spec_num_correct_drafts"] for a in r) for r in runs])
    for in_graph, eager in zip(*correct, strict=True):
        assert in_graph == pytest.approx(eager, rel=0.05) and in_graph > len(own_prompts)
