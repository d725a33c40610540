"""Small configurations of the classifier of sentences, with samples of unlike lengths."""

from pathlib import Path

from lightnet_data.sentences import Row, write
from lightnet_data.tokenizer import Tokenizer

MODEL = """causal: false, vocab_size: 300, layers: 2, width: 32, heads: 4, glu_width: 50, gate_rank: 8, tpe_rank: 8,
  tpe_init_length: 8, norm_eps: 1.0e-2, initializer_std: 0.15"""
HEADS = {"classes": "head: sequence_classifier, classes: 3", "value": "head: sequence_classifier, classes: 1"}


def write_config(folder: Path, head: str) -> Path:
    """A configuration of one of HEADS, and sentences whose words tell their label: its file."""
    tokenizer = Tokenizer.train(["red green blue and some other words"] * 30, 290)
    rows = [
        Row(f"some {['red', 'green', 'blue'][i % 3]} " + "other words " * (i % 5), "and" if i % 2 else None, i % 3)
        for i in range(30)
    ]
    classes = ["red", "green", "blue"] if head == "classes" else None
    write(folder / head, {"train": rows, "dev": rows[:13]}, tokenizer, 24, classes)
    config = folder / f"{head}.yaml"
    config.write_text(
        f"""
model: {{{HEADS[head]}, {MODEL}, dropout: 0.1}}
data: {{path: {folder / head}, sequence_length: 25}}
train: {{steps: 20, global_batch: 8, micro_batch: 2, precision: fp32, seed: 7}}
optimizer: {{learning_rate: 6.0e-3, eps: 1.0e-6, clip: 0.4}}
schedule: {{kind: cosine, warmup_steps: 3}}
validation: {{interval: 10, samples: 13}}
checkpoint: {{interval: 10}}
logging: {{interval: 1}}
"""
    )
    return config
