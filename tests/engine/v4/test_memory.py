"""Memory as ``hyperdflash plan`` reserves it against the tensors that a running server holds."""

import json
import re

import pytest

from sglang_hyperdflash.cpu.platform.memory import KV_GIB
from sglang_hyperdflash.tools.server_process import hyperdflash_arguments
from tests.engine.held import HELD
from tests.engine.v4.checkpoint import CONFIG, DRAFT, write_drafter
from tests.engine.v4.findings import note
from tests.engine.v4.serve import start
from tests.engine.v4.test_matrix import PAGE
from tests.unit.targets import v4_start
from triton_ops.copies import KINDS

pytestmark = pytest.mark.v4
GIB, REQUESTS, CONTEXT, LAYERS = 0.25, 4, 4096, DRAFT["layers"]
NODE = {"gpu_gib": GIB, "weights_gib": 0.0, "mem_fraction": 1.0, "max_running_requests": REQUESTS}
CELL = 2 * LAYERS * DRAFT["kv_heads"] * DRAFT["head_dim"] * 2
SOURCE = "from tests.engine.held import load  # noqa: F401\n"


def page_bytes(slots: int) -> int:
    """A page of latents of 584 bytes, padded to 576 as FlashMLA's layout is."""
    return -(-slots * 584 // 576) * 576


def target_bytes(tokens: int) -> int:
    """All of the target's K/V and states of compression under speculation, spare pages included."""
    ratios = CONFIG["compress_ratios"][: CONFIG["num_hidden_layers"]]
    c4, c128, width = ratios.count(4), ratios.count(128), CONFIG["head_dim"]
    index, full, window = CONFIG["index_head_dim"], tokens // PAGE, int(0.1 * tokens) // PAGE
    latents = len(ratios) * (window + 1) * page_bytes(256)
    latents += c4 * (full + 4) * page_bytes(64) + c128 * (full + 128) * page_bytes(2)
    keys = c4 * (full + 4) * 64 * (index + 4)
    rows = [-(-(n + ring + 1) // ratio) * ratio for n, ring, ratio in (
        (16 * window, 16, 4), (256 * (REQUESTS + 1), 256, 128),
    )]  # fmt: skip
    states = c4 * rows[0] * 4 * (width + index) + c128 * rows[1] * 2 * width
    return latents + keys + 4 * states


def drafter_bytes(tokens: int, window: int | None) -> int:
    """What a drafter of blocks of seven takes besides its weights, for so many target tokens."""
    addresses = 48 * LAYERS  # of the buffers, and their strides
    # A context and a block of each request; copies, first choices and a kind of match; the counts.
    slots = REQUESTS + 1
    copies = 4 * slots * (CONTEXT + 7) + 8 * (slots + 2) * 13 + 4 * 2 * KINDS * 2
    if window is None:
        return CELL * (tokens + PAGE) + addresses + copies
    blocks = 7 * REQUESTS
    ring = int(0.1 * tokens) - blocks
    pages = -(-(ring + blocks) // PAGE) + 1
    # Slots of tokens, tokens of slots, the head, the slots of blocks, and two ranges.
    tables = 8 * (tokens + PAGE + 1 + ring + 1 + 1 + blocks + window + 7)
    rows = (REQUESTS + 1) * (4 * (window + 7) + 8)
    return CELL * pages * PAGE + tables + rows + addresses + copies


@pytest.mark.parametrize("window", [None, 64])
def test_a_server_is_left_with_what_the_plan_reserves(servers, target, tmp_path, window):
    draft = write_drafter(tmp_path / "draft", window=window)
    case = {"target": str(target), "draft": str(draft), "method": "HYPERDFLASH", "node": NODE}
    plan = v4_start.start({"plan": case})["plan"]["budget"]
    environment = {HELD: str(tmp_path), KV_GIB: str(GIB)}
    arguments, more = hyperdflash_arguments(draft), {"source": SOURCE, "pool": ()}
    server = start(servers, "held", target, tmp_path, *arguments, **more, **environment)
    servers.stop("v4-held")
    log = server.log.read_text(errors="replace")
    tokens = int(re.search(r"max_total_num_tokens=(\d+)", log)[1])
    assert tokens == plan["tokens"]
    names = ("target", "drafter")
    held = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    # Two dimensions, but for the table of requests; one are the allocators' lists.
    kv = [n for n, shape in held["target"] if len(shape) == 2 and shape[0] > REQUESTS + 1]
    assert sum(kv) == target_bytes(tokens)
    drafted = sum(size for size, _ in held["drafter"])
    assert drafted == drafter_bytes(tokens, window)
    # What is not reserved by token does not grow with tokens; the window's share is whole pages.
    per_token, spare = plan["draft_bytes_per_token"], target_bytes(0)
    left = (plan["bytes_per_token"] - per_token) * tokens - target_bytes(tokens) + spare
    assert 0 <= left < target_bytes(10 * PAGE) - spare
    fixed = drafter_bytes(0 if window is None else 10 * 7 * REQUESTS, window)
    assert drafted <= per_token * tokens + fixed
    note(f"memory, window {window}", tokens=tokens, draft_bytes=per_token,
         spare_and_fixed=fixed + spare, held=sum(kv) + drafted)  # fmt: skip
