"""NeMo RL 2226: Megatron-Bridge's `save_megatron_model` on a world of which two ranks take no part, as the
ranks of an inference engine do."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from drill.ranks import Answer, ask, begin, ranks_in, side_of
from drill.results import Check, Row
from tests.integrations.bridge_jobs import save_of_some
from tests.integrations.megatron.jobs import children_allowed

WORLD, TRAIN = 6, 4
LIMIT_S = 6.0
TRACKER = "latest_checkpointed_iteration.txt"


def save(rank: int, folder: str, options: dict[str, Any] | None) -> Answer:
    begin(rank, None)
    with children_allowed():  # stock megatron-core writes in processes of its own
        said, seconds = save_of_some(rank, folder, TRAIN, None, options, LIMIT_S)
    error = "" if said in ("saved", "takes no part") else said
    return Answer(rank, seconds, said, error, ranks_in(error, rank))


def run() -> list[Row]:
    with TemporaryDirectory(prefix="holdfast-drill-") as top:
        theirs, mine = Path(top, "stock"), Path(top, "ours")
        train = range(TRAIN)
        stock = ask(WORLD, save, str(theirs), None, waited_for=train, patience=90.0)
        whole = {"session": True, "warm_up": True}
        ours = ask(WORLD, save, str(mine), whole, waited_for=train, patience=90.0)
        checks = (
            Check("stock waits to its timeout", all(a.error and a.seconds >= 0.8 * LIMIT_S for a in stock)),
            Check(
                "stock does not say for whom it waited",
                not any({4, 5} & set(answer.named) for answer in stock),
            ),
            Check("stock leaves no checkpoint that its tracker names", not (theirs / TRACKER).exists()),
            Check("with install() every rank that trains saves", all(a.value == "saved" for a in ours)),
            Check(
                "and the checkpoint is there, with the framework's own tracker file",
                (mine / TRACKER).exists() and (mine / "iter_0000000" / "index.safetensors").exists(),
            ),
        )
    scenario = f"save_megatron_model, {WORLD - TRAIN} of {WORLD} ranks take no part"
    return [Row("NeMo RL 2226", scenario, side_of(stock, "saved"), side_of(ours, "saved"), checks)]
