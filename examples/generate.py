"""Generate text from a script, by default from the bundled model.

A quarter of the experts is in memory.

    python examples/generate.py [MODEL [PROMPT]]
"""

import argparse

import mlx_moeflux
from mlx_moeflux.loading import BUNDLED_MODEL

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("model", nargs="?", default=BUNDLED_MODEL)
parser.add_argument("prompt", nargs="?", default="class Stack:\n")
args = parser.parse_args()

model, tokenizer = mlx_moeflux.load(args.model, expert_memory="25%")
with model:
    for response in mlx_moeflux.stream_generate(model, tokenizer, args.prompt, max_tokens=60):
        print(response.text, end="", flush=True)
print(f"\n\n{model.plan}\n{response.experts}")
