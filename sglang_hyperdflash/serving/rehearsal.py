"""Verification rehearsed at start, as large as it will be, so that sizing sees its memory."""

from __future__ import annotations

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_hyperdflash.draft.filters import Sampling
from sglang_hyperdflash.draft.propose import Candidates, propose
from sglang_hyperdflash.serving.draft_temperature import DraftTemperature
from sglang_hyperdflash.serving.exact import Draws
from sglang_hyperdflash.serving.sampled_worker import SampledWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


class RehearsedWorker(SampledWorker):
    """Overrides of ``DFlashWorkerV2.prewarm_sampling``."""

    def _prewarm_batch_size(self, block_size: int) -> int:
        """The largest batch that is served; SGLang rehearses the largest captured one.

        Larger ones verify eagerly. A prefill node verifies none.
        """
        most = self.model_runner.max_running_requests
        if not most or self.server_args.disaggregation_mode == "prefill":
            return super()._prewarm_batch_size(block_size)
        return max(1, int(most))

    def prewarm_sampling(self):
        """Rehearse verification; seam: ``DFlashWorkerV2.prewarm_sampling``.

        Raises:
            HyperDFlashConfigError: the largest batch does not fit.
        """
        try:
            return super().prewarm_sampling()
        except torch.OutOfMemoryError as error:
            requests = self._prewarm_batch_size(int(self.block_size))
            raise HyperDFlashConfigError(
                f"verifying {requests} sampled requests at once needs more GPU memory than is "
                "left. Lower --max-running-requests or --mem-fraction-static."
            ) from error

    def _measure_sampling_peak(
        self,
        *,
        candidates: torch.Tensor,
        target_logits: torch.Tensor,
        sampling_info: SamplingBatchInfo,
    ) -> int:
        """Peak bytes of one verification on CUDA; seam: ``DFlashWorkerV2.prewarm_sampling``.

        Half the requests have a seed, all filter by top-k, top-p and min-p: the most there is.
        """
        bs, drafts = len(candidates), int(self.block_size) - 1
        device = candidates.device
        sampling = Sampling(
            torch.ones(bs, device=device),
            torch.full((bs,), self.num_candidates, dtype=torch.int32, device=device),
            sampling_info.top_ps,
            torch.full((bs,), 0.01, device=device),
            True,
            True,
            True,
            True,
        )
        seeds = torch.arange(bs, device=device)
        draws = Draws(seeds, seeds % 2 == 0)
        self._contexts = torch.ones(bs, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        # The proposal lives through its verification.
        ids = torch.arange(self.num_candidates, device=device).repeat(bs, drafts, 1)
        proposal = propose(
            Candidates(ids, torch.zeros_like(ids, dtype=torch.float32)),
            candidates[:, 0],
            None,
            sampling,
            seeds,
            torch.zeros(bs, drafts, dtype=torch.int64, device=device),
            torch.ones(bs, device=device),
        )
        served = self.draft_temperature
        self.draft_temperature = DraftTemperature(device, fixed=served.fixed)
        try:
            self._verify(target_logits, sampling, proposal, draws)
        finally:
            self.draft_temperature = served  # which must not learn from a rehearsal
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before
