"""KDA targets (Kimi K3, Kimi Linear) on vLLM's V2 runner: ReplaySSM by our kernels in place of RecoverSSM's.

With --use-replayssm vLLM keeps one state a request and records a step's inputs; verification and commit are Triton
kernels outside of the Blackwell family. vLLM lets a layer class be replaced from outside (PluggableLayer), and that is
the seam: the layer, its metadata builder and its commit context are subclasses that replace

    vLLM's convolution update                   kda_conv.conv_verify, which leaves the history as it is
    vLLM's verification kernel                  dspark.kernels.kda_verify; with few requests it convolves too
    its plan, convolution and fold kernels      StepRows.commit, ConvTable.commit, dspark.kernels.kda_commit

Everything else, prefill above all, is vLLM's. What the layer hands over, and where it was rounded: q, k and v are
bfloat16 from the convolution (summed, SiLU applied and rounded once, from float32); the gate is the raw bfloat16 output
of f_b_proj, beta the raw bfloat16 logit of the input projection, a_log [H] and dt_bias [H K] are float32; norms, gate
and sigmoid are computed in float32 by the kernels; states are float32 (bfloat16 with --mamba-ssm-cache-dtype bfloat16),
u is float32, and the output is rounded to bfloat16 before the gated norm. We round where vLLM does, and nowhere else.

vLLM has RecoverSSM in its Kimi K3 layer only. A Kimi Linear target (low-rank output gate) is served by another layer
class, which indexes a state per draft token whether or not they were allocated: with --use-replayssm they are not
(model_executor/layers/mamba/abstract.py, num_speculative_blocks). Since both layers have the same parts, ours runs
Kimi K3's forward there.
Source: vLLM 0.33.0, models/kimi_k3/nvidia/{kda,kda_metadata}.py and, in model_executor/layers/mamba/gdn,
kimi_gdn_linear_attn.py.
"""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAAttentionBackend, KimiK3KDAMetadataBuilder

from dspark.kernels.kda import Gate, KDALayer, LayerTable, Records, Tokens
from dspark.kernels.kda_commit import check_block_size, kda_commit
from dspark.kernels.kda_verify import fits_inside, kda_verify
from dspark.vllm.kda_choice import wants_our_kernels
from dspark.vllm.kda_conv import ConvPages, ConvTable, check_pages, conv_verify
from dspark.vllm.kda_state import AlignedBlocks, StepRows

logger = init_logger("vllm.dspark")


def replace_layers() -> None:
    """Have vLLM build our layer classes in place of its own; more calls change nothing.

    A layer decides by its configuration whether it replays. Another plug-in's replacement of the same class stays.
    """
    for vllms_own, ours in (
        (KimiK3DeltaAttention, ReplayKimiK3Attention),
        (KimiGatedDeltaNetAttention, ReplayKimiLinearAttention),
    ):
        taken = op_registry_oot.get(vllms_own.__name__)
        if taken is None:
            PluggableLayer.register_oot(ours, name=vllms_own.__name__)
        elif taken is not ours:
            logger.warning(
                "%s is already replaced by %s of another plug-in; dspark's ReplaySSM kernels do not run there",
                vllms_own.__name__,
                taken.__name__,
            )


class ReplayMetadataBuilder(KimiK3KDAMetadataBuilder):
    """vLLM's metadata, with the step's rows as the kernels read them: made once a step, outside of CUDA graphs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step = StepRows(self.vllm_config.scheduler_config.max_num_seqs, self.device)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `build`; `replay_rows` of the result are the rows of its speculative requests, padding included."""
        metadata = super().build(*args, **kwargs)
        metadata.replay_rows = None
        if metadata.num_spec_decodes:
            indices = metadata.spec_state_indices_tensor[:, 0]
            metadata.replay_rows = self.step.verify(indices, metadata.spec_query_start_loc[: len(indices) + 1])
        return metadata

    def _get_recoverssm_context(self) -> "ReplayCommit":
        if self.recoverssm_context is None:
            layers = self.vllm_config.compilation_config.static_forward_context
            context = ReplayCommit({name: layers[name] for name in self.layer_names}, self.step)
            context.warm_up(self.kv_cache_spec.block_size if self.kv_cache_spec.mamba_cache_mode == "align" else None)
            logger.info_once(
                "dspark: %d KDA layers replay with its own kernels, up to %d requests and %d tokens of each in a step",
                sum(getattr(layer, "replays", False) for layer in layers.values()),
                self.step.max_rows,
                context.window,
            )
            self.recoverssm_context = context
        return self.recoverssm_context


class ReplayBackend(KimiK3KDAAttentionBackend):
    """vLLM's backend with our builder."""

    @staticmethod
    def get_builder_cls() -> type[ReplayMetadataBuilder]:
        return ReplayMetadataBuilder


class ReplayCommit:
    """Fold what a step keeps into state and history of all layers of a group: three launches a step, none waits."""

    def __init__(self, layers: dict[str, Any], step: StepRows) -> None:
        """`layers`: the group's layers by name, their caches bound."""
        self.step = step
        # Held here and not by the layers: vLLM drops its metadata builders when it drops the caches.
        self.states = {name: layer.replay_state() for name, layer in layers.items()}
        first = next(iter(layers.values()))
        self.window = first.spec_query_len
        self.table = LayerTable([state for state, _ in self.states.values()])
        self.conv = ConvTable([pages for _, pages in self.states.values()], first.conv_size)

    def warm_up(self, block_size: int | None) -> None:
        """Compile what a commit launches, by rows that keep nothing: else the first step of the first request would.

        Args:
            block_size: tokens of a block in align mode, else None.

        Raises:
            ValueError: a step could cross two block boundaries.
        """
        if block_size is not None:
            check_block_size(block_size, self.window)
        nothing = torch.zeros(1, dtype=torch.int32, device=self.table.offsets.device)
        blocks = () if block_size is None else (nothing[None], nothing, block_size)
        for requests in (None, nothing):
            self.commit(nothing, nothing, torch.zeros(2, dtype=torch.int32, device=nothing.device), requests, *blocks)

    def commit(
        self,
        num_accepted_tokens: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        request_indices: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
        mamba_block_size: int | None = None,
    ) -> None:
        """What vLLM calls after sampling; arguments as in `StepRows.commit`."""
        if not len(state_indices):
            return
        blocks = None
        if block_table is not None:
            blocks = AlignedBlocks(block_table, num_computed_tokens, mamba_block_size)
        plan = self.step.commit(num_accepted_tokens, state_indices, query_start_loc, request_indices, blocks)
        self.conv.commit(plan)
        kda_commit(self.table, plan.rows, plan.num_records, destinations=plan.destinations, boundary=plan.boundary)


class ReplayLayer:
    """What both layer classes share: records, and the verification of a step's speculative requests."""

    replays = False

    def _start_replaying(self, vllm_config: Any) -> None:
        """Allocate the records in place of vLLM's; at construction, so that memory profiling counts them."""
        if self.conv1d.bias is not None:
            raise ValueError(f"{self.prefix}: the convolution has a bias, which dspark's kernel does not add")
        self.replays = True
        rows, dtype = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.dtype
        device, heads, dim = self.conv1d.weight.device, self.local_num_heads, self.head_dim
        shape = (rows, heads, self.spec_query_len, dim)
        self.recoverssm_records = Records(
            correction=torch.empty(shape, dtype=torch.float32, device=device),
            key=torch.empty(shape, dtype=dtype, device=device),
            gate=torch.empty(shape, dtype=dtype, device=device),
        )
        conv_dtype = self.get_state_dtype()[0]
        self.replay_spare = torch.empty(rows, 3 * self.local_projection_size, dtype=conv_dtype, device=device)

    def get_attn_backend(self) -> Any:
        return ReplayBackend if self.replays else super().get_attn_backend()

    def replay_state(self) -> tuple[KDALayer, ConvPages]:
        """The layer's caches, records and gate as the kernels see them."""
        pages, state = self.kv_cache[:2]
        if not is_conv_state_dim_first():
            pages = pages.transpose(-1, -2)
        conv = ConvPages(pages, self.replay_spare)
        check_pages(conv, self.conv_size, self.spec_query_len)
        gate = Gate(self.A_log, self.dt_bias.view(self.local_num_heads, self.head_dim), self.gate_lower_bound)
        return KDALayer(state, self.recoverssm_records, gate), conv

    def _recoverssm_verify(
        self,
        m: Any,
        mixed_qkv: torch.Tensor,
        raw_g: torch.Tensor,
        raw_beta: torch.Tensor,
        conv_weight: torch.Tensor,
        query_start_loc: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self.replays:
            return super()._recoverssm_verify(m, mixed_qkv, raw_g, raw_beta, conv_weight, query_start_loc, out)
        layer, pages = m.recoverssm_context.states[self.prefix]
        rows = m.replay_rows
        window = pages.window(conv_weight)
        tokens = self._tokens(mixed_qkv, raw_g, raw_beta)
        if fits_inside(tokens, window, rows, self.spec_query_len):
            # Projections come between the launch that wrote the rows and this one.
            return kda_verify(tokens, layer, rows, deferred=False, window=window, rows_settled=True, out=out)
        mixed = conv_verify(mixed_qkv, conv_weight, pages, rows, self.spec_query_len)
        return kda_verify(self._tokens(mixed, raw_g, raw_beta), layer, rows, deferred=False, out=out)

    def _tokens(self, mixed: torch.Tensor, raw_g: torch.Tensor, raw_beta: torch.Tensor) -> Tokens:
        """A packed line of tokens; `mixed` [N, C]."""
        shape = (1, len(mixed), self.local_num_heads, self.head_dim)
        query, key, value = (x.view(shape) for x in mixed.split(self.local_projection_size, dim=-1))
        return Tokens(query, key, value, raw_g, raw_beta)


class ReplayKimiK3Attention(ReplayLayer, KimiK3DeltaAttention):
    """Kimi K3's layer. Where vLLM has its CuTe kernels, on the Blackwell family, those stay."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        if wants_our_kernels(vllm_config) and self.recoverssm_backend == "triton":
            self._start_replaying(vllm_config)


class ReplayKimiLinearAttention(ReplayLayer, KimiGatedDeltaNetAttention):
    """Kimi Linear's layer, with Kimi K3's forward pass and metadata when it replays.

    The parts that this forward asks for and the class lacks are set to what "no special kernel" means there.
    """

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        if not wants_our_kernels(vllm_config):
            return
        self.use_recoverssm, self.recoverssm_backend = True, "triton"
        self.spec_query_len = 1 + self.num_spec
        self.kda_prefill_backend = self.kda_decode_backend = "triton"
        self.kda_spec_decode_backend = "native"
        self.decode_conv1d_weight = self.decode_norm_weight = None
        self._start_replaying(vllm_config)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return KimiK3DeltaAttention.get_state_dtype(self) if self.replays else super().get_state_dtype()

    def _forward(self, *args: Any, **kwargs: Any) -> None:
        if self.replays:
            KimiK3DeltaAttention._forward(self, *args, **kwargs)
        else:
            super()._forward(*args, **kwargs)
