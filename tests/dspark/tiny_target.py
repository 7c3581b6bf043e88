"""A byte-level tokenizer with the default target's special tokens and chat template, and tiny models to go with it.

They stand in for the real pair where a test is about the program around it: 259 tokens, made in milliseconds and
identical on every run.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(num_layers: int = 2, seed: int = 0, tie_word_embeddings: bool = True) -> LlamaForCausalLM:
    """Random float32 Llama over the tokenizer's 259 tokens; untrained, so its text is noise."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def write_tiny_target(folder: Path) -> Path:
    """Save the random model and the tokenizer as a Hugging Face folder."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def counting_model() -> LlamaForCausalLM:
    """A target that continues every token with the next id, the last with 0; a text ends when it comes to <|im_end|>.

    Attention and MLPs add nothing, so the residual stream stays the token's code; the head finds the successor by it.
    """
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        codes = token_codes(model.config.vocab_size, model.config.hidden_size)
        model.model.embed_tokens.weight.copy_(codes)
        model.lm_head.weight.copy_(4 * codes.roll(1, dims=0))
    return model


def token_codes(vocab_size: int, rank: int) -> torch.Tensor:
    """[vocab_size, rank] rows of length sqrt(rank), each closest to itself."""
    codes = torch.randn(vocab_size, rank, generator=torch.Generator().manual_seed(7))
    return codes * rank**0.5 / codes.norm(dim=1, keepdim=True)


def write_counting_pair(folder: Path) -> tuple[Path, Path]:
    """A counting target and a drafter whose Markov head counts too: with temperature 0 every draft is accepted."""
    counting_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    vocab_size, hidden_size, rank = len(SPECIAL_TOKENS) + 256, 32, 32
    raw = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"],
        "block_size": 4,
        "mask_token_id": 0,
        "num_target_layers": 2,
        "target_layer_ids": [0],
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    path = folder / "drafter"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    shapes = {
        "embed_tokens.weight": (vocab_size, hidden_size),
        "lm_head.weight": (vocab_size, hidden_size),
        "fc.weight": (hidden_size, hidden_size),
        "hidden_norm.weight": (hidden_size,),
        "norm.weight": (hidden_size,),
        "layers.0.input_layernorm.weight": (hidden_size,),
        "layers.0.post_attention_layernorm.weight": (hidden_size,),
        "layers.0.self_attn.q_norm.weight": (16,),
        "layers.0.self_attn.k_norm.weight": (16,),
        **{f"layers.0.self_attn.{name}_proj.weight": (hidden_size, hidden_size) for name in "qkvo"},
        "layers.0.mlp.gate_proj.weight": (48, hidden_size),
        "layers.0.mlp.up_proj.weight": (48, hidden_size),
        "layers.0.mlp.down_proj.weight": (hidden_size, 48),
        "confidence_head.proj.weight": (1, hidden_size + rank),
        "confidence_head.proj.bias": (1,),
    }
    tensors = {name: torch.full(shape, 0.01) for name, shape in shapes.items()}
    tensors["lm_head.weight"].zero_()
    codes = token_codes(vocab_size, rank)
    tensors["markov_head.markov_w1.weight"] = codes
    tensors["markov_head.markov_w2.weight"] = 4 * codes.roll(1, dims=0)
    save_file(tensors, path / "model.safetensors")
    return folder / "target", path
