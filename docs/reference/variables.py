"""The environment variables of the package and its tests, for ``environment.md``."""

from typing import NamedTuple

from sglang_hyperdflash.tools.environment import DEFAULTS


class Variable(NamedTuple):
    """An environment variable; ``docs/reference/environment.md`` is made from these texts."""

    name: str
    default: str
    reader: str
    meaning: str


# fmt: off
VARIABLES = (
    Variable("HYPERDFLASH_WIDTH", "adaptive", "a HYPERDFLASH server",
             "rows verified for each request in a round: `adaptive`, `full` (the block size), a "
             "number from 1 to the block size, or `random` (drawn every round, for tests)"),
    Variable("HYPERDFLASH_WIDTHS",
             "1, 2, 4 and the block size; 1 and the block size if the drafter's block is not "
             "causal",
             "a HYPERDFLASH server with an adaptive or random width",
             "the allowed widths, separated by commas"),
    Variable("HYPERDFLASH_DRAFT_TEMPERATURE", DEFAULTS["HYPERDFLASH_DRAFT_TEMPERATURE"],
             "a HYPERDFLASH server",
             "draft temperature of sampled requests, relative to the request's own: from 0 "
             "(argmax drafts) to 1; it never changes the output distribution"),
    Variable("HYPERDFLASH_COPY", DEFAULTS["HYPERDFLASH_COPY"],
             "a HYPERDFLASH server",
             "a request's last tokens, of prompt and answer, that drafts may copy; 0 for none, "
             "else at least 64; 4 bytes each, for every request that runs at once"),
    Variable("HYPERDFLASH_OPERATORS", "triton", "every command on a GPU",
             "operators that run their torch reference on a GPU, slower: `torch` for all, names "
             "separated by commas for some; a server adds those whose kernel it finds wrong at "
             "start"),
    Variable("HYPERDFLASH_DRAFT_POOL_RATIO", DEFAULTS["HYPERDFLASH_DRAFT_POOL_RATIO"],
             "a server with a windowed drafter",
             "draft K/V slots per target token, above 0 and at most 1"),
    Variable("HYPERDFLASH_RECORD", "unset: nothing is recorded", "a HYPERDFLASH server",
             "folder of the store that a share of the requests is recorded to, with their tokens"),
    Variable("HYPERDFLASH_RECORD_SHARE", DEFAULTS["HYPERDFLASH_RECORD_SHARE"],
             "a server that records",
             'share of the requests, 0 to 1, chosen by a hash of their id; `"custom_params": '
             '{"hyperdflash_record": true}` or `false` decides for one request'),
    Variable("HYPERDFLASH_RECORD_GIB", DEFAULTS["HYPERDFLASH_RECORD_GIB"],
             "a server that records",
             "upper limit of its part of the store, GiB: half for the newest requests, half for "
             "a sample of all older ones"),
    Variable("HYPERDFLASH_RECORD_LENGTH", DEFAULTS["HYPERDFLASH_RECORD_LENGTH"],
             "a server that records",
             "tokens of a request that are stored at most, at least 16: of its prompt the last "
             "ones, up to half of this, then its answer"),
    Variable("HYPERDFLASH_RECORD_CONTEXT", DEFAULTS["HYPERDFLASH_RECORD_CONTEXT"],
             "a server that records",
             "share of that prompt, 0 to 1, that must not come from the prefix cache, or the "
             "request is not recorded; what comes from there is not stored"),
    Variable("HYPERDFLASH_CPU", "0; 1 for servers that commands of this package start",
             "any SGLang process",
             "1 registers the CPU platform where there is no accelerator, for servers of any "
             "algorithm"),
    Variable("HYPERDFLASH_CPU_KV_GIB", DEFAULTS["HYPERDFLASH_CPU_KV_GIB"],
             "a server on the CPU platform without `--max-total-tokens`",
             "upper limit of K/V memory, GiB"),
    Variable("HYPERDFLASH_CAPTURE_FOLDER", "unset",
             "the engine of `hyperdflash capture`, which sets it",
             "folder for the residuals of captured requests"),
    Variable("HYPERDFLASH_API_KEY", "unset", "`regenerate`, `learn`, `eval`",
             "key of the servers' API"),
    Variable("HYPERDFLASH_SOAK_MINUTES", "30", "`make soak`", "minutes of traffic"),
    Variable("HYPERDFLASH_TEST_TEMPLATE", "1", "engine tests",
             "0: start every test server as a new process instead of forking one that has the "
             "imports"),
    Variable("HYPERDFLASH_TEST_DATA", "unset", "tests",
             "folder with the `benchmarks/*.jsonl` of `python -m eval fetch`; unset: prompts of "
             "this repository"),
)
# fmt: on
