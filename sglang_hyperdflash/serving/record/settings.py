"""Which requests a server records, and where: ``HYPERDFLASH_RECORD`` and variables next to it.

A request decides for itself with SGLang's sampling parameter ``custom_params``, which every API
takes and no part of SGLang but custom logit processors reads: ``{"hyperdflash_record": false}``.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.environment import positive_number
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import keep_apart

RECORD = "HYPERDFLASH_RECORD"
ASKED = "hyperdflash_record"
# Why a request is shed, and what else is counted; ``scheduler/metrics.py`` exports these.
CACHED, BEHIND, MEMORY, DISK = "cached", "behind", "memory", "disk"
UNFINISHED, BROKEN = "unfinished", "broken"
REASONS = (CACHED, BEHIND, MEMORY, DISK, UNFINISHED, BROKEN)
REQUESTS, BYTES = "requests", "bytes"


@dataclass(frozen=True)
class RecordSetting:
    """What is recorded.

    Attributes:
        folder: the store's.
        share: of the requests, from 0 to 1.
        budget: bytes that this server's shards may take.
        length: tokens of a sample at most; half of them at most are the prompt's last ones.
        context: share of these prompt tokens that must be computed, not from the prefix cache.
    """

    folder: Path
    share: float
    budget: int
    length: int
    context: float

    def wants(self, req: Any) -> bool:
        """Whether SGLang's ``Req`` is to be recorded: as it asks, or by a hash of its id.

        Not one whose prompt is more than its tokens, nor one without an answer.
        """
        more = (req.multimodal_inputs, req.input_embeds, req.positional_embed_overrides)
        if any(one is not None for one in more) or req.sampling_params.max_new_tokens == 0:
            return False
        given = req.sampling_params.custom_params
        asked = given.get(ASKED) if isinstance(given, dict) else None
        if isinstance(asked, bool):
            return asked
        digest = hashlib.blake2b(str(req.rid).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.share * 2**64

    def range(self, prompt: int, cached: int) -> range | None:
        """Positions to record of a request; None where too much of its context is cached.

        Args:
            prompt: tokens of its prompt. cached: of these, from the prefix cache; at most all but
                the last.
        """
        context = min(prompt, self.length // 2)
        if prompt - cached < self.context * context:
            return None
        start = max(prompt - context, cached)
        return range(start, start + self.length)


def read_record_setting() -> RecordSetting | None:
    """The setting; None: nothing is recorded.

    Raises:
        HyperDFlashConfigError: a variable is not of its form.
    """
    folder = os.environ.get(RECORD, "").strip()
    if not folder:
        return None
    share, whole = "a number from 0 to 1", "a number of tokens of at least 16"
    return RecordSetting(
        Path(folder).absolute(),
        positive_number(f"{RECORD}_SHARE", share, most=1.0, least=0.0),
        int(positive_number(f"{RECORD}_GIB", "a number above 0") * 2**30),
        int(positive_number(f"{RECORD}_LENGTH", whole, least=16)),
        positive_number(f"{RECORD}_CONTEXT", share, most=1.0, least=0.0),
    )


def check_recording(setting: RecordSetting | None, server_args: Any, source: str) -> None:
    """Refuse to record where no whole request has its residual, or over other files.

    Args:
        source: of the drafter's features.

    Raises:
        HyperDFlashConfigError, NotOurs: expected, found and what to do.
    """
    if setting is None:
        return
    if server_args.disaggregation_mode not in (None, "null"):
        raise HyperDFlashConfigError(
            f"{RECORD}: expected a server that prefills and decodes, found --disaggregation-mode "
            f"{server_args.disaggregation_mode}, where neither node has a whole request. Unset it."
        )
    if source == "layers":
        raise HyperDFlashConfigError(
            f"{RECORD}: expected a drafter that reads the residual before the collapse, found one "
            "that reads captured layers. Unset it."
        )
    read = {"the target": server_args.model_path}
    read["the drafter"] = server_args.speculative_draft_model_path
    keep_apart(RECORD, setting.folder, read)
