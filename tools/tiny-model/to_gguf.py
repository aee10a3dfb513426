"""Writes a GGUF file, tokenizer included, from a Hugging Face folder of a Llama, Qwen2 or Qwen3 model.

    python to_gguf.py FOLDER OUT.gguf --type q8_0
    python to_gguf.py FOLDER OUT.gguf --type q6_k --fallback q8_0 --tensor 'token_embd=q8_0'

Matrices get `--type`, or the first `--tensor PATTERN=TYPE` whose pattern is found in their GGUF name; where a row
does not divide into that type's blocks they get `--fallback`. Vectors (norms, biases) stay f32.
"""
import argparse
import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

import kquants

TYPES = {t.name.lower(): t for t in (T.F32, T.F16, T.BF16, T.Q8_0, T.Q5_0, T.Q5_1, T.Q4_0, T.Q4_1, T.Q4_K, T.Q6_K)}
FILE_TYPES = {T.F32: 0, T.F16: 1, T.Q4_0: 2, T.Q4_1: 3, T.Q8_0: 7, T.Q5_0: 8, T.Q5_1: 9, T.Q4_K: 14, T.Q6_K: 18,
              T.BF16: 32}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
                 "Qwen3ForCausalLM": "qwen3"}
PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
         "lm_head.weight": "output.weight"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def gguf_name(name):
    """`model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    if name in WHOLE:
        return WHOLE[name]
    layer, part, kind = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name).groups()
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def permute(rows, heads):
    """Rows of q or k from the order of transformers, which turns element i with i + d/2, to that of ggml's Llama,
    which turns 2i with 2i + 1."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermute(rows, heads):
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def heads_to_permute(config, name):
    """How many heads the rows of this tensor have, if they are to be permuted; 0 if not."""
    if ARCHITECTURES[config["architectures"][0]] != "llama":
        return 0
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else 0


def rope_of(config):
    """Type, theta and the other parameters, in the spelling of transformers 5 or 4."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    return rope.pop("rope_type", None) or rope.pop("type", "default"), theta, rope


def llama3_factors(theta, head_dim, rope):
    """By what each frequency is divided; llama.cpp keeps Llama 3's scaling in this form, as `rope_freqs.weight`."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    out = []
    for i in range(0, head_dim, 2):
        turns = context / (2 * math.pi * theta ** (i / head_dim))
        if turns > high:
            out.append(1.0)
        elif turns < low:
            out.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def add_architecture(writer, config, architecture):
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kind, theta, rope = rope_of(config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(head_dim)
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        if rope.keys() - {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}:
            raise SystemExit("yarn: GGUF holds a factor, the original context and the betas only")
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "beta_slow" in rope:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(theta, head_dim, rope))
    elif kind != "default":
        raise SystemExit(f"rope type {kind} has no form in GGUF")
    if "kv_owner_layer" in config:                          # kvist's own key: llama.cpp has no such sharing
        writer.add_array(f"{architecture}.kv_owner_layer", config["kv_owner_layer"])


def add_bpe_tokenizer(writer, folder, pre, vocab=None):
    """The byte-level BPE of `tokenizer.json`, as llama.cpp's "gpt2" tokenizer."""
    data = json.loads((folder / "tokenizer.json").read_text())
    model = data["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise SystemExit("tokenizer.json holds no byte-level BPE")
    by_id = {i: (token, NORMAL) for token, i in model["vocab"].items()}
    for added in data.get("added_tokens", []):
        by_id[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    count = vocab or max(by_id) + 1
    entries = [by_id.get(i, (f"[PAD{i}]", 5)) for i in range(count)]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {token: i for i, (token, _) in by_id.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in entries])
    writer.add_token_types([kind for _, kind in entries])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    for key, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if settings.get(key):
            add(ids[settings[key]])
    writer.add_add_bos_token(bool(settings.get("add_bos_token")))


def choose(name, row, kind, fallback, overrides):
    """The type of the matrix called `name`, with rows of `row` elements."""
    for pattern, given in overrides:
        if re.search(pattern, name):
            kind = given
            break
    for candidate in (kind, fallback):
        if row % gguf.GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return T.F16


def add_tensors(writer, config, tensors, kind, fallback=T.Q8_0, overrides=()):
    """Writes `tensors` (f32 numpy arrays by their Hugging Face names). Gives {name: (type, what a reader gets)}, the
    latter in the order of transformers again."""
    read_back = {}
    for name, data in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        target, heads = gguf_name(name), heads_to_permute(config, name)
        rows = np.ascontiguousarray(permute(data, heads) if heads else data, np.float32)
        chosen = T.F32 if rows.ndim == 1 else choose(target, rows.shape[-1], kind, fallback, overrides)
        raw = kquants.quantize(rows, chosen)
        writer.add_tensor(target, raw, raw_dtype=None if chosen in (T.F32, T.F16) else chosen)
        plain = gguf.quants.dequantize(raw, chosen).reshape(rows.shape)
        read_back[name] = (chosen, unpermute(plain, heads) if heads else plain)
    return read_back


def open_writer(path, config, kind, name):
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_architecture(writer, config, architecture)
    return writer


def close_writer(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_folder(folder):
    """All tensors as f32 numpy arrays, from one file or shards."""
    import torch  # numpy has no bf16
    from safetensors.torch import load_file
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "expected.safetensors":
            tensors.update({k: v.to(torch.float32).numpy() for k, v in load_file(path).items()})
    return tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="config.json, *.safetensors, tokenizer.json, tokenizer_config.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=TYPES, default="q8_0")
    parser.add_argument("--fallback", choices=TYPES, default="q8_0", help="where rows do not fit --type's blocks")
    parser.add_argument("--tensor", metavar="PATTERN=TYPE", action="append", default=[], help="may be repeated")
    parser.add_argument("--pre", default="qwen2", help="name of the pre-tokenizer, as llama.cpp calls it")
    parser.add_argument("--name", help="general.name; default: the folder's name")
    parser.add_argument("--description")
    parser.add_argument("--license", help="an SPDX expression")
    parser.add_argument("--author")
    args = parser.parse_args()

    config = json.loads((args.folder / "config.json").read_text())
    overrides = []
    for item in args.tensor:
        pattern, _, kind = item.rpartition("=")
        if not pattern or kind not in TYPES:
            parser.error(f"--tensor {item}: PATTERN=TYPE, the type one of {', '.join(TYPES)}")
        overrides.append((pattern, TYPES[kind]))
    tensors = load_folder(args.folder)
    writer = open_writer(args.out, config, TYPES[args.type], args.name or args.folder.name)
    if args.description:
        writer.add_description(args.description)
    if args.license:
        writer.add_license(args.license)
    if args.author:
        writer.add_author(args.author)
    add_bpe_tokenizer(writer, args.folder, args.pre, config["vocab_size"])
    read_back = add_tensors(writer, config, tensors, TYPES[args.type], TYPES[args.fallback], overrides)
    close_writer(writer)

    kinds = {}
    for name, (kind, plain) in read_back.items():
        error = float(np.square(plain - tensors[name]).sum()), float(np.square(tensors[name]).sum())
        count, weights, e, x = kinds.get(kind.name, (0, 0, 0.0, 0.0))
        kinds[kind.name] = (count + 1, weights + plain.size, e + error[0], x + error[1])
    for kind, (count, weights, e, x) in kinds.items():
        print(f"{kind:5} {count:3} tensors {weights:10,} weights, relative error {math.sqrt(e / x):.2e}")
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
