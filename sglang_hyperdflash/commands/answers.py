"""The output file of commands that answer prompts: one owner, one run, its own resume state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import ResumableWriter
from sglang_hyperdflash.tools.ownership import claim_file


@dataclass(frozen=True)
class Answers:
    """An output file that this run holds.

    Attributes:
        done: the records that it held, by the index of their prompt. resumed: whether an earlier
            run of the same settings was here.
    """

    writer: ResumableWriter
    done: dict[int, dict[str, Any]]
    resumed: bool


@contextmanager
def hold_answers(
    output: Path, kind: str, settings: Mapping[str, Any], digests: Mapping[int, str]
) -> Iterator[Answers]:
    """Hold an output file whose records have ``index`` and ``digest``.

    A last line cut by a kill, or a line that no longer fits its checksum, is dropped and its prompt
    asked again.

    Args:
        settings: all that shapes an answer. digests: of the prompts, by index.

    Raises:
        NotOurs: the file is something else, or answers with other settings. InUse: another run
            writes it. HyperDFlashConfigError: it answers another input.
    """
    with claim_file(output, kind, settings) as held, ResumableWriter(output, seal=True) as writer:
        if writer.dropped:
            lines = ", ".join(map(str, writer.dropped[:5]))
            print(f"{output}: dropped damaged line {lines}; its prompt is asked again")
        done = {r["index"]: r for r in writer.records if r["index"] in digests}
        for index, record in done.items():
            if digests[index] != record["digest"]:
                raise HyperDFlashConfigError(
                    f"--output {output} holds answers to another input (index {index}). Choose "
                    "another --output, or remove the file."
                )
        yield Answers(writer, done, held.resumed)
