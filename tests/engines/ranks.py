"""A program for the Python of `.venv-engines`: vLLM's own loader fills vLLM's own model on several ranks, and
what Holdfast says of the healthy model and of each fault goes into a file, one JSON a line.

    python -m tests.engines.ranks qwen3_moe TP2 a/folder
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.docs.pages import code, text
from tests.engines.faults import FAULTS
from tests.engines.models import LAYOUTS, publish, stand_in_for_operators
from tests.support.ports import held_port

STALE = next(fault for fault in FAULTS if fault.name == "stale layer")


@contextmanager
def engine(
    folder: Path,
    rank: int,
    layout: str,
    port: int,
    weights: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[object, torch.nn.Module]]:
    """Yield vLLM's configuration, and its model on this rank, filled by its loader. weights: others than the
    folder's."""
    ranks, experts = LAYOUTS[layout]
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_DIST_IDENT=f"holdfast-{port}",
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    stand_in_for_operators()
    import vllm.model_executor.models.registry as registry
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    registry._run_in_subprocess = lambda function: function()  # where the operators are declared
    config = EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=True,
        tensor_parallel_size=ranks,
        enable_expert_parallel=experts,
        max_model_len=64,
        distributed_executor_backend="mp",
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=ranks,
            rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            local_rank=rank,
            backend="gloo",
        )
        initialize_model_parallel(tensor_model_parallel_size=ranks)
        torch.set_default_dtype(dtype)
        model = initialize_model(vllm_config=config)
        torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            parameter.data.fill_(7)  # what the loader leaves out differs
        model.load_weights(iter((weights or load_file(folder / "model.safetensors")).items()))
        yield config, model


def run(rank: int, kind: str, layout: str, folder: Path, port: int) -> None:
    ranks, _ = LAYOUTS[layout]
    with (
        engine(folder / "model", rank, layout, port) as (config, model),
        open(folder / "said", "a") as said,
    ):
        import holdfast

        job = holdfast.Job(timeout=60)

        def say(case: str, **more: object) -> None:
            try:
                found = holdfast.engine.fingerprint(model, job=job)
            except holdfast.errors.HoldfastError as error:
                print(
                    json.dumps({"case": case, "rank": rank, "error": str(error), **more}),
                    file=said,
                    flush=True,
                )
                return
            if rank == 0:
                verdict = holdfast.same(found, folder / "model")
                whole = {name: one for name, one in trainers.items() if name in found}
                by_whole = holdfast.same(found, whole) if whole else None
                print(
                    json.dumps(
                        {
                            "case": case,
                            **more,
                            "same": verdict.same,
                            "equal": verdict.equal,
                            "only": [verdict.only_a, verdict.only_b],
                            "different": {one.name: [one.ranks, one.surely] for one in verdict.different},
                            "by_whole": by_whole
                            and {one.name: [one.ranks, one.surely] for one in by_whole.different},
                            "text": str(verdict),
                        }
                    ),
                    file=said,
                    flush=True,
                )

        from safetensors.torch import load_file

        trainers = holdfast.fingerprint(
            load_file(folder / "model/model.safetensors"), job=holdfast.Job(no_dist=True)
        )
        say("healthy")
        (page, *_) = (block for _, block in code(text("docs/engine.md")) if "if not verdict.same" in block)
        names = {"holdfast": holdfast, "model": model, "trainer": folder / "model"}
        exec(page, names)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        loaded = {name: tensor.data.clone() for name, tensor in tensors.items()}
        for fault in FAULTS:
            for victim in sorted({0, ranks // 2, ranks - 1}):
                where = fault.find(tensors)
                if where is None:
                    continue
                if rank == victim:
                    fault.change(tensors[where].data)
                say(fault.name, victim=victim, parameter=where)
                for name, tensor in tensors.items():
                    tensor.data.copy_(loaded[name])
        say("healthy again")
        if rank == ranks - 1:
            STALE.change(tensors[STALE.find(tensors)].data)
        try:
            exec(page, names)
        except RuntimeError as error:
            print(json.dumps({"case": "page", "rank": rank, "error": str(error)}), file=said, flush=True)
        for name, tensor in tensors.items():
            tensor.data.copy_(loaded[name])
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        say("processed")


if __name__ == "__main__":
    kind, layout, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    stand_in_for_operators()
    if not (folder / "model").exists():
        publish(kind, folder / "model")
    with held_port() as port:
        torch.multiprocessing.start_processes(
            run, args=(kind, layout, folder, port), nprocs=LAYOUTS[layout][0], start_method="spawn"
        )
