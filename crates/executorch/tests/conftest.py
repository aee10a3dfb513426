import os
from pathlib import Path

import pytest
import torch


def model(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = dict(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.2,
    )
    return LlamaForCausalLM(LlamaConfig(**{**config, **more})).eval()


@pytest.fixture(scope="session")
def llama():
    return model()


@pytest.fixture(scope="session")
def pte(tmp_path_factory):
    """The model as a program, with the embeddings and the output of layer 2 as features."""
    from kvist.executorch import export

    path = Path(os.environ.get("KVIST_PTE", tmp_path_factory.mktemp("pte") / "tiny.pte"))
    if not path.exists():
        assert export(model(), path, max_step_tokens=64, features=(0, 2)) == 3
    return path


@pytest.fixture(scope="session")
def program(pte):
    from kvist.executorch import Program

    return Program(pte)


@pytest.fixture(scope="session")
def alone(llama):
    """The logits of every token of a text, by the model itself, without any cache."""
    import copy

    plain = copy.deepcopy(llama)
    plain.config._attn_implementation = "sdpa"

    def logits(tokens, window=None):
        n = len(tokens)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        if window:
            mask &= ~torch.ones(n, n, dtype=torch.bool).tril(-window)
        with torch.no_grad():
            return plain(torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False).logits[0]

    return logits
