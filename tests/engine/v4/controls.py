"""Faults put in on purpose: what a test of this folder must notice.

``V4_FAULT`` names one of them.
"""

import os

import torch

FAULT = "V4_FAULT"


def _poison(first: int) -> None:
    """After every round, write NaN over the ring rows of its block from ``accepted + first`` on."""
    from sglang_hyperdflash.serving.worker import HyperDFlashWorker

    generate = HyperDFlashWorker.forward_batch_generation

    def poisoned(self, batch, *args, **kwargs):
        before = batch.seq_lens.clone()
        decoding = batch.forward_mode.is_decode()
        result = generate(self, batch, *args, **kwargs)
        if not decoding or not len(before):
            return result
        pool = self.model_runner.token_to_kv_pool_allocator.get_kvcache()
        for state in filter(None, pool.compress_state_pools):
            if state.ratio != 128:
                continue
            rows, width = state.kv_score_buffer.kv_score, int(result.speculative_num_draft_tokens)
            each = (batch.req_pool_indices, before, result.accept_lens)
            for request, length, kept in zip(*(x.tolist() for x in each), strict=True):
                offsets = torch.arange(kept + first, width)
                rows[request * state.ring_size + (length + offsets) % state.ring_size] = torch.nan
        return result

    HyperDFlashWorker.forward_batch_generation = poisoned


def poison_rejected_states() -> None:
    """No fault: nothing may read what rejected drafts left in the ratio-128 rings."""
    _poison(0)


def poison_an_accepted_state() -> None:
    """The last accepted token's row too, which the next boundary reads."""
    _poison(-1)


def install() -> None:
    """The fault that the environment names, if any."""
    if FAULT in os.environ:
        globals()[os.environ[FAULT]]()
