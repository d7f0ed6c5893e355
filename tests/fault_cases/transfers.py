"""Faults of a transfer between a prefill and a decode process, by the senders of test_disaggregated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFault:
    """A sender that does its work wrongly: seen on the decode side, before the request's first forward."""

    title: str
    story: str
    sender: str  # class in tests.reference_engine.disaggregated
    reports: tuple[str, ...]
    finds: tuple[str, ...] = ("head kv_data",)  # "phase reason", sorted
    harmless: str = ""  # why the answer stays as it was
    model: str = "llama"
    shortest: int = 6  # tokens of the prompt


TRANSFERS = (
    TransferFault(
        title="partial transfer",
        story="the last slots of a request are not sent",
        sender="Truncated",
        reports=(
            "https://github.com/vllm-project/vllm/pull/57662",
            "https://github.com/vllm-project/vllm/issues/52234",
        ),
    ),
    TransferFault(
        title="layer-incomplete transfer",
        story="the last layer is not sent, or read before it was computed",
        sender="MissingLayer",
        reports=("https://github.com/sgl-project/sglang/pull/31239",),
    ),
    TransferFault(
        title="transfer without index keys",
        story="the keys that sparse attention chooses by are not sent: decode reads the wrong tokens",
        sender="NoIndexKeys",
        reports=("https://github.com/ROCm/ATOM/pull/1368",),
        model="mla_sparse",
        shortest=24,  # more than attention reads: else there is nothing to choose
    ),
    TransferFault(
        title="transfer in another order",
        story="two slots arrive in each other's place",
        sender="Reordered",
        reports=("https://github.com/NVIDIA/TensorRT-LLM/pull/18657",),
        harmless="attention ignores the order of slots, as keys hold positions; a later prefix hit would not",
    ),
    TransferFault(
        title="chunk sent twice",
        story="a slot's bytes are sent a second time, in place of the next slot's",
        sender="Duplicated",
        reports=("https://github.com/kvcache-ai/Mooncake/issues/4153",),
    ),
    TransferFault(
        title="transfer to the wrong slot",
        story="the bytes land one page off: in KV of another request, or in pages that were freed",
        sender="Misdirected",
        reports=(
            "https://github.com/sgl-project/sglang/issues/24527",
            "https://github.com/sgl-project/sglang/pull/35049",
        ),
    ),
    TransferFault(
        title="transfer of other pages",
        story="the sender reads pages that are not the request's (reused, or an index off), records and all",
        sender="WrongSource",
        reports=(
            "https://github.com/vllm-project/vllm/issues/52234",
            "https://github.com/ai-dynamo/dynamo/issues/826",
        ),
        finds=("head position",),
        harmless="the pages planted are the request's own, one further: the same in another order",
    ),
    TransferFault(
        title="damage before the transfer",
        story="KV changes on the prefill side after its forward; prefill stays clean, decode must notice",
        sender="DamagedAtSource",
        reports=("https://github.com/sgl-project/sglang/pull/39229",),
        harmless="one low bit of one float64 is planted: the least that can happen is seen",
    ),
)
