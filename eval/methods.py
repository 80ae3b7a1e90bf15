"""The methods that can be compared: their names, server arguments, and the draft each needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from sglang_hyperdflash.serving.settings import COPY, WIDTH
from sglang_hyperdflash.tools.checksum import file_hash, short_hash
from sglang_hyperdflash.tools.ownership import location
from sglang_hyperdflash.tools.provenance import without_machine

BASELINE, NOISE = "baseline", "baseline-again"
DRAFT_OPTION = "--speculative-draft-model-path"
COPIED = "32768"


@dataclass(frozen=True)
class Kind:
    """A method: its label in tables, SGLang's algorithm, drafts a round, the option of its draft.

    environment: of its server.
    """

    label: str
    algorithm: str | None
    num_drafts: int
    draft_option: str | None = None
    draft_required: bool = True
    environment: tuple[tuple[str, str], ...] = ()


def _mtp(steps: int) -> Kind:
    # A target that carries its own NextN layer (DeepSeek-V4) needs no draft folder.
    return Kind(f"MTP ({steps})", "EAGLE", steps, "mtp_draft", draft_required=False)


def _hyperdflash(label: str, draft_option: str, width: str = "full", copy: str = "0") -> Kind:
    """HYPERDFLASH; as other methods it drafts six tokens in every round, and copies none."""
    environment = (WIDTH, width), (COPY, copy)
    return Kind(label, "HYPERDFLASH", 6, draft_option, environment=environment)


KINDS: Mapping[str, Kind] = {
    BASELINE: Kind("baseline", None, 0),
    "mtp3": _mtp(3),
    "mtp6": _mtp(6),
    "dflash6": Kind("Vanilla DFlash (6)", "DFLASH", 6, "dflash_draft"),
    "hyperdflash6": _hyperdflash("HyperDFlash (6)", "hyperdflash_draft"),
    "hyperdflash-copies": _hyperdflash(
        "HyperDFlash and copies (6)", "hyperdflash_draft", copy=COPIED
    ),
    # As it is served.
    "hyperdflash-adaptive": _hyperdflash(
        "HyperDFlash, adaptive width", "hyperdflash_draft", "adaptive", COPIED
    ),
    "hyperdflash2": _hyperdflash("HyperDFlash-2 (6)", "hyperdflash2_draft"),
    "hyperdflash2-copies": _hyperdflash(
        "HyperDFlash-2 and copies (6)", "hyperdflash2_draft", copy=COPIED
    ),
    # The source, head and loss of another method on our layers, served by our worker.
    "dspark-style": _hyperdflash("DSpark-style (6)", "dspark_style_draft"),
    "dflash2-style": _hyperdflash("DFlash 2-style (6)", "dflash2_style_draft"),
    # Bundled in V4-Flash-0731, whose config says five drafts.
    "dspark": Kind("DSpark", "DSPARK", 5, "dspark_draft", draft_required=False),
    "ngram": Kind("n-gram", "NGRAM", 6),
}


def label(method: str) -> str:
    """A method's name in tables and charts."""
    if method == NOISE:
        return "baseline, again (noise floor)"
    return KINDS[method].label if method in KINDS else method


def is_hyperdflash(method: str) -> bool:
    """Whether it is one of this project's methods."""
    return method.startswith("hyperdflash")


def drafting(methods: Iterable[str]) -> list[str]:
    """The methods that draft, once each, in their order."""
    return [m for m in dict.fromkeys(methods) if m not in (BASELINE, NOISE)]


@dataclass(frozen=True)
class Method:
    """A method to run: its server's arguments and environment, or a running server's address."""

    name: str
    arguments: tuple[str, ...]
    num_drafts: int
    url: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def identity(self) -> dict[str, Any]:
        """What two runs must share for their numbers to be of one method.

        A draft counts by its path (``without_machine``) and by its files: a retrained drafter is
        another one.
        """
        arguments, found = list(self.arguments), {}
        if DRAFT_OPTION in arguments:
            at = arguments.index(DRAFT_OPTION)
            draft = arguments[at + 1]
            del arguments[at : at + 2]
            files = [*Path(draft).glob("*.safetensors"), *Path(draft).glob("config.json")]
            hashes = sorted([path.name, file_hash(path)] for path in files)
            found = {"draft": without_machine(location(draft)), "draft files": short_hash(hashes)}
        own = {"arguments": arguments, "url": self.url, "environment": dict(self.environment)}
        return own | found


def _arguments(name: str, kind: Kind, draft: str | None) -> tuple[str, ...]:
    if kind.algorithm is None:
        return ()
    arguments = ("--speculative-algorithm", kind.algorithm)
    if draft is not None:
        arguments += (DRAFT_OPTION, str(draft))
    if name.startswith("mtp"):
        steps = str(kind.num_drafts)
        arguments += ("--speculative-num-steps", steps, "--speculative-eagle-topk", "1")
    if name.startswith("mtp") or name == "ngram":
        arguments += ("--speculative-num-draft-tokens", str(kind.num_drafts + 1))
    return arguments


def resolve(
    names: Sequence[str], drafts: Mapping[str, str | Path | None], urls: Mapping[str, str]
) -> list[Method]:
    """Methods by name, the baseline first.

    Args:
        drafts: folder or hub id by draft option. urls: running servers by method.

    Raises:
        EvalError: an unknown method, a missing draft, or no baseline to compare with.
    """
    methods = []
    for name in dict.fromkeys([*names, *urls]):
        if name not in KINDS:
            raise EvalError(f"unknown method {name!r}; known are {', '.join(KINDS)}.")
        kind = KINDS[name]
        if name in urls:
            methods.append(Method(name, (), kind.num_drafts, urls[name]))
            continue
        draft = drafts.get(kind.draft_option or "")
        if kind.draft_option and kind.draft_required and not draft:
            option = "--" + kind.draft_option.replace("_", "-")
            raise EvalError(f"method {name} needs {option}: the folder or hub id of its draft.")
        if draft and Path(draft).is_absolute() and not Path(draft).is_dir():
            raise EvalError(f"method {name}: its draft {draft} is not a folder.")
        arguments = _arguments(name, kind, draft)
        methods.append(Method(name, arguments, kind.num_drafts, None, kind.environment))
    if BASELINE not in {m.name for m in methods}:
        raise EvalError(f"--methods must include {BASELINE}: speedup and identity refer to it.")
    return sorted(methods, key=lambda m: list(KINDS).index(m.name))


def parse_urls(pairs: Sequence[str]) -> dict[str, str]:
    """``name=url`` options; raises ``EvalError`` for anything else."""
    urls = {}
    for pair in pairs:
        name, separator, url = pair.partition("=")
        if not separator or not url.startswith(("http://", "https://")):
            raise EvalError(f"--server takes name=url, found {pair!r}.")
        urls[name] = url.rstrip("/")
    return urls
