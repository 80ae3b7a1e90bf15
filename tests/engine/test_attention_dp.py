"""Attention data parallelism: two ranks, each with its own requests, run rounds together."""

import random

import pytest

from sglang_hyperdflash.serving.settings import COPY, WIDTH
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.conftest import FP32, greedy, greedy_all, ids, install_plugin

# The portable target computes its experts on each rank. Here, before that, ranks gather their rows
# as experts do that are split over them: ranks whose rounds differ hang or read others' rows.
PLUGIN = """
def load():
    from sglang_hyperdflash.seams import when_imported

    when_imported("sglang_hyperdflash.cpu.portable.deepseek_v4", patch)


def patch():
    from sglang.srt.layers import dp_attention
    from sglang.srt.runtime_context import get_parallel
    from sglang_hyperdflash.cpu.portable import core, deepseek_v4

    target, batches = deepseek_v4.PortableDeepSeekV4ForCausalLM, []
    forward, experts = target.forward, core.MoE.forward

    def remember(self, input_ids, positions, forward_batch, *rest, **more):
        batches[:] = [forward_batch]
        return forward(self, input_ids, positions, forward_batch, *rest, **more)

    def gather(self, x, input_ids):
        batch = batches[0]
        everyones = dp_attention.get_global_dp_buffer(get_parallel().tp_group)
        dp_attention.dp_gather_partial(everyones, x.clone(), batch)
        rows = x.clone()
        dp_attention.dp_scatter(rows, everyones, batch)
        idle = batch.forward_mode.is_idle()  # its padding may hold anything
        assert idle or rows[: batch._original_num_tokens].equal(x[: batch._original_num_tokens])
        return experts(self, x, input_ids)

    target.forward, core.MoE.forward = remember, gather
"""
RANKS = ("--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-lm-head")
KINDS = {
    "random widths": "random",
    "one narrow width": pytest.param("3", marks=pytest.mark.slow),
    "adaptive": pytest.param("adaptive", marks=pytest.mark.slow),
}


@pytest.mark.parametrize("width", KINDS.values(), ids=KINDS)
def test_answers_are_the_baselines(
    servers, target_dir, drafter_dir, own_prompts, baseline, tmp_path, width
):
    """With an idle rank, one that prefills while the other decodes, and ranks that end apart."""
    environment = install_plugin(tmp_path, "gather", PLUGIN) | {WIDTH: width, COPY: "0"}
    arguments = (*FP32, *RANKS, *hyperdflash_arguments(drafter_dir))
    server = servers.get("dp", target_dir, *arguments, environment=environment)
    expected = [answer[:32] for answer in baseline["long"]]

    def on_rank(rank: int):
        return lambda server, prompt: greedy(server, prompt, 32, routed_dp_rank=rank)

    for rank in (0, 1):  # the other one is idle
        answers = greedy_all(server, own_prompts[:4], 2, on_rank(rank))
        assert ids(answers) == expected[:4]
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {rank}
    lengths = random.Random(0)

    def ask(server, prompt):
        """Of any length: one rank prefills or is idle while the other decodes."""
        count = lengths.randint(1, 96)
        answer = greedy(server, prompt, count)["output_ids"]
        assert answer == baseline["long"][own_prompts.index(prompt)][:count]
        return answer

    greedy_all(server, own_prompts * 4, 6, ask)
    if width == "3":
        proposed = [greedy(server, prompt)["meta_info"] for prompt in own_prompts[:2]]
        drafts = {each["spec_num_proposed_drafts"] / each["spec_verify_ct"] for each in proposed}
        assert drafts == {2.0}
    servers.stop("dp")
