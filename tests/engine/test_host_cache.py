"""SGLang's hierarchical cache: prefixes that come back from host memory, and from files."""

import json

import pytest

from eval.histograms import accept_length_of, add_histograms
from sglang_hyperdflash.serving.settings import COPY, POOL_RATIO
from sglang_hyperdflash.tools.acceptance import counters
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.asking import add_result
from tests.engine.conftest import FP32, flush, greedy_all, ids, install_plugin
from tests.engine.drafters import with_window

# What SGLang copies with CUDA alone: pinned memory, and pages between it and the device.
PLUGIN = """
def copy(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def load():
    from sglang_hyperdflash.seams import when_imported

    when_imported("sglang.srt.mem_cache.pool_host.mha", patch)


def patch():
    from sglang.srt.mem_cache.pool_host import common, mha

    original = mha.MHATokenToKVPoolHost.__init__

    def pageable(self, *arguments, **options):
        original(self, *arguments, **options)
        self.pin_memory = False

    mha.MHATokenToKVPoolHost.__init__ = pageable
    common._cuda_host_register = lambda buffer, granularity=None: None
    mha.transfer_kv_direct = copy
"""
# Fewer slots than the prompts take, a host pool that holds them all.
SMALL = ("--max-total-tokens", "640", "--page-size", "16", "--max-running-requests", "4")
HOST = ("--enable-hierarchical-cache", "--hicache-io-backend", "direct")
HOST += ("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through")
# The drafter's window, the storage below the host's memory, and its size in device pools.
KINDS = {
    "no window": pytest.param(None, None, "8", marks=pytest.mark.slow),
    "window": pytest.param(64, None, "8"),
    "window and a full host": pytest.param(64, None, "1.5", marks=pytest.mark.slow),
    "window and files": pytest.param(64, "file", "8", marks=pytest.mark.slow),
}


@pytest.mark.parametrize("window, storage, ratio", KINDS.values(), ids=KINDS)
def test_restored_prefixes_change_no_answer(
    request,
    servers,
    target_dir,
    drafter_dir,
    own_prompts,
    baseline,
    hyper_server,
    tmp_path,
    window,
    storage,
    ratio,
):
    # Second turns: longer together than the device's pool.
    turns = zip(own_prompts, baseline["long"], strict=True)
    contexts = [prompt + answer[:64] + prompt for prompt, answer in turns]
    expected = ids(greedy_all(hyper_server, contexts, 4))
    environment = install_plugin(tmp_path, "host_cache", PLUGIN) | {COPY: "0", POOL_RATIO: "0.5"}
    environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(tmp_path / "files")
    draft = drafter_dir if window is None else with_window(drafter_dir, tmp_path / "d", window)
    stored = ("--hicache-storage-backend", storage) if storage else ()
    if storage:
        prefetch = {"prefetch_threshold": 16}
        stored += ("--hicache-storage-prefetch-policy", "wait_complete")
        stored += ("--hicache-storage-backend-extra-config", json.dumps(prefetch))
    arguments = (
        *FP32,
        *SMALL,
        *HOST,
        "--hicache-ratio",
        ratio,
        *stored,
        *hyperdflash_arguments(draft),
    )
    rounds, restored, recomputed = [], [], []
    for _ in range(1 + bool(storage)):
        server = servers.get("host", target_dir, *arguments, environment=environment)
        for _ in range(3):
            answers = greedy_all(server, contexts, 2)
            assert ids(answers) == expected
            restored.append(sum(answer["meta_info"]["cached_tokens"] for answer in answers))
            rounds.append([counters(answer["meta_info"])[2] for answer in answers])
        if not storage:
            flush(server)
            recomputed = greedy_all(server, contexts, 1)
            recomputed = [counters(answer["meta_info"])[2] for answer in recomputed]
        servers.stop("host")
    if recomputed:
        sides = {"restored": rounds[2], "recomputed": recomputed}
        taus = {name: accept_length_of(add_histograms(each)) for name, each in sides.items()}
        result = taus | {"restored tokens": restored[2]}
        add_result("host_cache", request.node.callspec.id, result)
    assert restored[2] > 640 or ratio != "8", "more than the device holds"
    if storage:
        assert restored[3] > 640, "a new server finds the first one's files"
    if window is None and not storage:
        assert rounds[2] == recomputed, "the drafter's K/V come back with the target's"
