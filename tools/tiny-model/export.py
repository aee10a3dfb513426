"""A Hugging Face folder (f16 weights, config, tokenizer files) from a checkpoint of `train.py`, or the mean of several.

    python export.py RUN/before.pt RUN/checkpoint.pt --out FOLDER
"""
import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from model import Shape


def config_of(shape):
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=shape.hidden,
        intermediate_size=shape.intermediate, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, hidden_act="silu", vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context, rms_norm_eps=shape.eps, rope_theta=shape.theta,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, bos_token_id=0, eos_token_id=1,
        torch_dtype="float16")
    if shape.share > 1:     # kvist's key: transformers has no class for it
        config["kv_owner_layer"] = [shape.owner(layer) for layer in range(shape.layers)]
    return config


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).with_name("tokenizer.json"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    states = [torch.load(path, map_location="cpu", weights_only=True) for path in args.checkpoints]
    shape = Shape(**states[0]["shape"])
    mean = {name: sum(state["model"][name] for state in states) / len(states) for name in states[0]["model"]}
    args.out.mkdir(parents=True, exist_ok=True)

    def write(name, value):
        (args.out / name).write_text(json.dumps(value, indent=2) + "\n")

    weights = {"model." + name: tensor.half().contiguous() for name, tensor in mean.items()}
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    write("config.json", config_of(shape))
    write("generation_config.json", dict(bos_token_id=0, eos_token_id=1))
    write("tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin_of_text|>",
                                        eos_token="<|end_of_text|>", add_bos_token=True,
                                        model_max_length=shape.context))
    if args.tokenizer.resolve() != (args.out / "tokenizer.json").resolve():
        shutil.copy(args.tokenizer, args.out / "tokenizer.json")


if __name__ == "__main__":
    main()
