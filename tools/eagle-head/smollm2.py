"""SmolLM2-135M-Instruct as a target: its shape, and what its head reads."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tiny-model"))
from model import Shape  # noqa: E402

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
MARKS = 1, 2            # <|im_start|>, <|im_end|>
SHAPE = Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocabulary=49152, context=8192,
              theta=100_000.0, eps=1e-5)
LAYERS = 2, 15, 27      # the residual streams entering these layers are the features
