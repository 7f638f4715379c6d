"""Core attention on PyTorch's SDPA, for where Transformer Engine is not installed.

Suffixes and dimensions as in attention_layout.py, which says where the tokens of a microbatch lie.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tepo_megatron.actor.attention_layout import Layout, spread
from tepo_megatron.actor.shared_attention import shared_attention
from tepo_megatron.errors import ConfigError


class SDPACoreAttention(MegatronModule):
    """Causal attention in the place that Megatron's layer specs call `core_attention`: grouped queries, packed sequences, CP.

    Under CP every rank holds zigzag chunks of each sequence (ops/context_parallel.py). Keys and values of all ranks are
    gathered; each of the rank's two chunks of queries then attends to the sequence up to its own end.
    Collectives: forward: one all-gather of keys and values over CP; backward: one reduce-scatter over CP. None without CP.

    Raises ConfigError, at construction, for what it does not compute: attention that is not causal self-attention, dropout,
    sliding windows, attention sinks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """As Megatron calls it. softmax_scale: 1 / sqrt(D) by default; cp_comm_type: Transformer Engine's, without effect."""
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_supported(config, layer_number, attn_mask_type, attention_type, dropout)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Packed (THD): query [S, H, D], key and value [S, K, D] -> [S, H D]; else [s, b, H, D], [s, b, K, D] -> [s, b, H D].

        packed_seq_params: its `cu_seqlens_q_padded` (else `cu_seqlens_q`) counts the tokens of all CP ranks; its `starts`, if
        it has that attribute, are those of a PackedMicrobatch: what starts above 0 sees the prompt before it too. Raises
        ValueError when the lengths do not add up to the tokens given, when 2 cp does not divide one, or for a mask or a bias.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("SDPACoreAttention is causal by position and takes neither mask nor bias; pass None")
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._attend(query, key, value, self._packed_layout(packed_seq_params, query))
        length, batch = query.shape[:2]
        layout = Layout.of([length * self.cp_group.size()] * batch, self.cp_group, query.device)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        output_S = self._attend(query, key, value, layout)
        return output_S.view(batch, length, -1).transpose(0, 1)

    def _packed_layout(self, params: PackedSeqParams, query_S: Tensor) -> Layout:
        """The microbatch's layout, left on `params` by the first layer: on a GPU, reading `cu_seqlens` waits for it."""
        layout: Layout | None = getattr(params, "sdpa_layout", None)
        if layout is None:
            cu = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
            lengths = [b - a for a, b in itertools.pairwise(cu.tolist())]
            if sum(lengths) != query_S.size(0) * self.cp_group.size():
                raise ValueError(
                    f"cu_seqlens describe {sum(lengths)} tokens over all context-parallel ranks, but each of the "
                    f"{self.cp_group.size()} ranks holds {query_S.size(0)}"
                )
            layout = Layout.of(lengths, self.cp_group, query_S.device, getattr(params, "starts", None))
            params.sdpa_layout = layout
        return layout

    def _attend(self, query_S: Tensor, key_S: Tensor, value_S: Tensor, layout: Layout) -> Tensor:
        """[S, H, D], [S, K, D], [S, K, D] -> [S, H D]."""
        key_T, value_T = self._gather(key_S, value_S)
        if layout.prompts:
            return shared_attention(query_S, key_T, value_T, layout, self.softmax_scale)
        queries = spread(query_S, layout.query_slot_S, layout.query_rows)
        keys = spread(key_T, layout.key_slot_T, layout.key_rows)
        values = spread(value_T, layout.key_slot_T, layout.key_rows)
        outputs: list[Tensor] = []
        for bucket, q, k, v in zip(
            layout.buckets,
            queries.split([b.query_rows for b in layout.buckets]),
            keys.split([b.key_rows for b in layout.buckets]),
            values.split([b.key_rows for b in layout.buckets]),
            strict=True,
        ):
            outputs += bucket.attend(q, k, v, self.softmax_scale)
        return torch.cat(outputs).index_select(0, layout.query_slot_S).flatten(1)

    def _gather(self, key_S: Tensor, value_S: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all CP ranks, rank after rank. Forward: all-gather over CP; backward: reduce-scatter over CP."""
        if self.cp_group.size() == 1:
            return key_S, value_S
        both_T = gather_from_sequence_parallel_region(torch.cat((key_S, value_S), dim=-1), group=self.cp_group)
        key_T, value_T = both_T.split((key_S.size(-1), value_S.size(-1)), dim=-1)
        return key_T, value_T


def _check_supported(
    config: TransformerConfig, layer_number: int, mask_type: AttnMaskType, attention_type: str, dropout: float
) -> None:
    refused: dict[str, Any] = {}
    if mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        refused["attn_mask_type"] = mask_type.name
    if attention_type != "self":
        refused["attention_type"] = attention_type
    if dropout:
        refused["attention_dropout"] = dropout
    if config.window_size is not None:
        refused["window_size"] = config.window_size
    if config.softmax_type != "vanilla":
        refused["softmax_type"] = config.softmax_type
    if refused:
        what = ", ".join(f"{key}={value}" for key, value in refused.items())
        raise ConfigError(
            f"model.attention=sdpa computes causal self-attention only; layer {layer_number} asks for {what}; use "
            "model.attention=te on platform=cuda"
        )
