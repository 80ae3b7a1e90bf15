"""The start of a recording: its memory, its store and its thread."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from sglang.srt.runtime_context import get_parallel, get_schedule

from sglang_hyperdflash.serving.record.recorder import Recorder
from sglang_hyperdflash.serving.record.settings import RecordSetting
from sglang_hyperdflash.serving.runners import Runners
from sglang_hyperdflash.targets.files import TargetFiles

logger = logging.getLogger(__name__)


def start_recording(setting: RecordSetting | None, runners: Runners) -> Recorder | None:
    """This rank's recorder; None where it records nothing.

    Rank 0 of each group of attention ranks records: with attention data parallelism every group has
    requests of its own. Its memory is taken before SGLang divides what is left.

    Raises:
        HyperDFlashError: the folder cannot be used, see :func:`.writer.open_store`.
    """
    parallel = get_parallel()
    if setting is None or parallel.attn_tp_rank or parallel.attn_cp_rank:
        return None
    # A server that does not record does not import what trains.
    from sglang_hyperdflash.serving.record.writer import Writer, open_store
    from sglang_hyperdflash.training.store.identity import identity_of

    config, schedule = runners.target.model_config, get_schedule()
    files = TargetFiles(config.model_path, config.revision)
    identity = identity_of(files, str(config.dtype).removeprefix("torch."))
    held = ExitStack()
    store = open_store(setting, identity, held)
    chunk = schedule.chunked_prefill_size
    if not chunk or chunk < 0:
        chunk = schedule.max_prefill_tokens
    # Two whole requests, and what is recorded of a prefill on average.
    rows = 2 * setting.length + int(setting.share * chunk)
    width = identity.hc_mult * identity.hidden_size
    recorder = Recorder(setting, rows, width, config.dtype, runners.device)
    Writer(recorder, store, held).start()
    logger.info(
        f"HYPERDFLASH records {setting.share:.1%} of the requests to {setting.folder} as "
        f"{store.name}, with {recorder.ring.host.nbytes >> 20} MiB for rows under way."
    )
    return recorder
