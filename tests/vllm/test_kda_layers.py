"""vLLM's own KDA layer classes, built by vLLM, with our verification and commit inside: Kimi K3's and Kimi Linear's.

The layers are real and so is their forward pass behind the projections; the engine around them is `kda_blocks`. On a
CPU the definitions in PyTorch run, on a GPU the kernels. Prefill, graphs and the engine itself are checked by
scripts/check_vllm_kda.py. Only vLLM 0.33.0 has these layers in this form, and it is not published for a CPU.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import vllm
from kda_blocks import CHANNELS, DEVICE, DIM, HEADS, NULL, WIDTH, Served
from packaging.version import Version

HIDDEN, WINDOW = 32, 5
ERROR = 2e-5 if DEVICE == "cuda" else 3e-6
RELEASE = "0.33.0"
pytestmark = pytest.mark.skipif(
    Version(vllm.__version__).base_version != RELEASE, reason=f"vLLM {vllm.__version__}; the layers are of {RELEASE}"
)
KINDS = ("KimiK3DeltaAttention", "KimiGatedDeltaNetAttention")


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """vLLM's configuration of a Kimi target. The speculative part is ours, because vLLM refuses it on a CPU."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("kimi")
    linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": DIM, "num_heads": HEADS}
    linear |= {"short_conv_kernel_size": WIDTH, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    fields = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    made = EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=6,
        max_model_len=64,
        enable_prefix_caching=False,
    ).create_engine_config()
    made.speculative_config = SimpleNamespace(method="dspark", num_speculative_tokens=WINDOW - 1)
    made.cache_config.use_replayssm = made.cache_config.use_kda_recoverssm = True
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('group')}/store", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield made


def build(config, kind, number):
    """A layer as vLLM's model builds it: by the name of vLLM's class."""
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
    from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention

    from dspark.vllm.kda import replace_layers

    replace_layers()
    replace_layers()  # more calls change nothing
    cls = {c.__name__: c for c in (KimiK3DeltaAttention, KimiGatedDeltaNetAttention)}[kind]
    hf = config.model_config.hf_config
    hf.linear_attn_config["use_full_rank_gate"] = cls is KimiK3DeltaAttention
    return cls(hf, config, prefix=f"model.layers.{number}.self_attn")


class ServedByVllm(Served):
    """The miniature engine, its layers being vLLM's."""

    def __init__(self, config, kind, align=None, numbers=(0, 1)) -> None:
        from dspark.vllm.kda import ReplayCommit

        super().__init__(window=WINDOW, align=align, num_layers=len(numbers), dtype=torch.float32, error=ERROR)
        self.vllms = [build(config, kind, n) for n in numbers]
        for i, layer in enumerate(self.vllms):
            layer.conv1d.weight.data.copy_(self.weight[:, None])
            layer.A_log.data.copy_(self.layers[i].gate.a_log)
            layer.dt_bias.data.copy_(self.layers[i].gate.dt_bias.flatten())
            sizes = [
                torch.Size(s).numel() * d.itemsize
                for s, d in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
            ]
            layer.bind_kv_cache(torch.zeros(self.num_blocks, 1, 1, sum(sizes) + 64, dtype=torch.int8))
            del layer._modules["o_norm"]  # a kernel; here the layer's output is what the recurrence gives
            layer.o_norm = lambda x, gate: x
        self.commit_context = ReplayCommit({layer.prefix: layer for layer in self.vllms}, self.step_rows)
        states = [layer.replay_state() for layer in self.vllms]
        self.layers, self.pages = [s for s, _ in states], [p for _, p in states]

    def layer_outputs(self, i, mixed_qkv, gate, beta, rows, out):
        """The layer's forward pass behind its projections, told about the step by vLLM's metadata."""
        from vllm.forward_context import set_forward_context
        from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadata

        count, layer = len(rows.slots), self.vllms[i]
        starts = torch.cat([rows.first_token, (rows.first_token + rows.num_rows)[-1:]]).int()
        metadata = KimiK3KDAMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=count,
            num_spec_decode_tokens=int(starts[-1]),
            num_actual_tokens=mixed_qkv.shape[0],
            spec_query_start_loc=starts,
            spec_state_indices_tensor=rows.slots.clamp_min(NULL).int()[:, None],
            num_accepted_tokens=torch.ones(count, dtype=torch.int32),
            recoverssm_context=self.commit_context,
        )
        metadata.replay_rows = rows
        with set_forward_context({layer.prefix: metadata}, self.vllms_config):
            layer._forward(mixed_qkv=mixed_qkv, g1=gate, g2=None, beta=beta, core_attn_out=out)
        return out

    def fold(self, accepted, indices, starts, requests, blocks) -> None:
        aligned = () if blocks is None else (blocks.block_table, blocks.num_computed, blocks.block_size)
        self.commit_context.commit(accepted, indices, starts, requests, *aligned)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("align", [None, 8])
@pytest.mark.parametrize("fuse_below", [2 * HEADS + 1, 0], ids=["convolving-up-to-two-requests", "two-launches"])
def test_vllms_layers_replay(config, kind, align, fuse_below, monkeypatch):
    from dspark.kernels import kda_verify as kernels
    from dspark.vllm import kda

    inside = []
    verify = kda.kda_verify
    monkeypatch.setattr(kernels, "FUSE_BELOW", fuse_below)
    monkeypatch.setattr(
        kda, "kda_verify", lambda *args, **named: inside.append("window" in named) or verify(*args, **named)
    )
    first = 100 + 40 * KINDS.index(kind) + (align or 0) + 20 * bool(fuse_below)
    numbers = (first, first + 1)
    served = ServedByVllm(config, kind, align, numbers)
    served.vllms_config = config
    assert all(layer.replays for layer in served.vllms)
    assert served.layers[0].checkpoint.shape[1:] == (HEADS, DIM, DIM)
    assert served.pages[0].pages.shape[1:] == (CHANNELS, WIDTH + WINDOW - 2)
    for computed in (1, 7, 12):
        served.admit(computed)
    served.step([(0, 5, 2), (1, 5, 5), (2, 5, 0)])
    served.step([(2, 1, 1), (0, 3, 1)], padding=2)
    served.step([(1, 5, 1), (2, 4, 4)], padding=1, with_requests=True)
    served.step([(0, 5, 5), (1, 5, 4), (2, 5, 3)])
    served.step([(1, 5, 2), (0, 1, 1)])
    fused = [False, False, False, False, bool(fuse_below)]  # rows of padding count
    assert inside == [x for x in fused for _ in numbers]


def test_metadata_carries_the_rows(config, monkeypatch):
    from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadataBuilder

    from dspark.vllm.kda import ReplayBackend, ReplayMetadataBuilder
    from dspark.vllm.kda_state import StepRows

    layer = build(config, "KimiK3DeltaAttention", 30)
    assert layer.get_attn_backend() is ReplayBackend
    assert ReplayBackend.get_builder_cls() is ReplayMetadataBuilder
    builder = ReplayMetadataBuilder.__new__(ReplayMetadataBuilder)
    builder.step = StepRows(6, DEVICE)
    given = SimpleNamespace(
        num_spec_decodes=2,
        spec_state_indices_tensor=torch.tensor([[4], [9], [0]], dtype=torch.int32),
        spec_query_start_loc=torch.tensor([0, 5, 6, 6], dtype=torch.int32),
    )
    monkeypatch.setattr(KimiK3KDAMetadataBuilder, "build", lambda self, *args, **named: given)
    rows = builder.build(0, None).replay_rows
    assert rows.slots.tolist() == [4, 9, -1]
    assert rows.num_rows.tolist() == [5, 1, 0]
    given.num_spec_decodes = 0
    assert builder.build(0, None).replay_rows is None


def test_other_configurations_keep_vllms_kernels(config, monkeypatch):
    from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAAttentionBackend

    from dspark.vllm.kda_choice import wants_our_kernels

    assert wants_our_kernels(config)
    monkeypatch.setattr(config, "additional_config", {"dspark_kda": "vllm"})
    layer = build(config, "KimiK3DeltaAttention", 40)
    assert not layer.replays
    assert layer.get_attn_backend() is KimiK3KDAAttentionBackend
    monkeypatch.setattr(config, "additional_config", {"dspark_kda": "both"})
    with pytest.raises(ValueError, match="dspark_kda='both'; expected 'kernels'"):
        wants_our_kernels(config)
    monkeypatch.setattr(config, "additional_config", {})
    monkeypatch.setattr(config.speculative_config, "method", "mtp")
    assert not wants_our_kernels(config)
    assert not build(config, "KimiGatedDeltaNetAttention", 41).replays


def test_a_block_that_a_step_can_cross_twice_is_refused(config):
    served = ServedByVllm(config, "KimiK3DeltaAttention", None, (50,))
    with pytest.raises(ValueError, match="block_size=4 is smaller than a step of 5 tokens"):
        served.commit_context.warm_up(4)
