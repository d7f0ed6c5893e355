"""Which of a server's schedulers this one is, and which layers and heads of the model it holds."""

from __future__ import annotations

from typing import Any

from canary_obs.engines.sglang.settings import settings_of


def ranks_of(scheduler: Any, *, local: bool) -> tuple[int, str]:
    """This scheduler's number in its server, and the ranks that report to one service, as settings have them.

    Replicas are counted one after another, within each the pipeline's stages, within a stage its tensor
    ranks. `local`: the service serves one host, and so hears that host's ranks only.
    """
    arguments, parallel = settings_of(scheduler), _parallel(scheduler)
    width, stages = int(arguments.tp_size), int(arguments.pp_size)
    # With attention in parallel over data, the replicas are tensor-parallel ranks of one model.
    replicas = 1 if arguments.enable_dp_attention else int(arguments.dp_size)
    replica = int(parallel.dp_rank or 0) if replicas > 1 else 0
    rank = (replica * stages + int(parallel.pp_rank)) * width + int(parallel.tp_rank)
    first, total = 0, replicas * stages * width
    if local and (nodes := int(arguments.nnodes)) > 1:  # as SGLang spreads one replica; more stay on one host
        per_stage = max(nodes // stages, 1)
        node, total = int(arguments.node_rank), total // nodes
        first = node // per_stage * max(stages // nodes, 1) * width + node % per_stage * (width // per_stage)
    return rank, f"{first}-{first + total - 1}"


def first_head(scheduler: Any) -> int:
    """The number, in the model, of the first KV head that this scheduler's attention holds."""
    parallel, model = _parallel(scheduler), scheduler.model_config
    size, rank, total = int(parallel.attn_tp_size), int(parallel.attn_tp_rank), model.get_total_num_kv_heads()
    # Fewer heads than ranks: several ranks hold the same one.
    return rank * int(model.get_num_kv_heads(size)) if total >= size else rank * int(total) // size


def attention_rank(scheduler: Any) -> int:
    """Which share of each layer's attention this scheduler holds."""
    return int(_parallel(scheduler).attn_tp_rank)


def _parallel(scheduler: Any) -> Any:
    """SGLang's own numbers: of the process, in 0.5.16 of the scheduler."""
    if (found := getattr(scheduler, "ps", None)) is not None:
        return found
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
