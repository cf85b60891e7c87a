"""Generate text from a script, by default from the bundled model.

A quarter of the experts is in memory.

    python examples/generate.py [MODEL [PROMPT]]
"""

import sys

import mlx_moeflux
from mlx_moeflux.loading import BUNDLED_MODEL

path = sys.argv[1] if len(sys.argv) > 1 else BUNDLED_MODEL
prompt = sys.argv[2] if len(sys.argv) > 2 else "class Stack:\n"

model, tokenizer = mlx_moeflux.load(path, expert_memory="25%")
with model:
    for response in mlx_moeflux.stream_generate(model, tokenizer, prompt, max_tokens=60):
        print(response.text, end="", flush=True)
print(f"\n\n{model.plan}\n{response.experts}")
