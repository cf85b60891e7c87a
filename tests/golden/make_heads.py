"""Write the golden heads: tiny random heads of multi-token prediction, and their logits.

    pip install "mlx_moeflux[parity]"
    python tests/golden/make_heads.py            # rewrite every head
    python tests/golden/make_heads.py text_top3  # or some of them

Each is heads/CASE.safetensors: the head of the twin CASE of make_golden.py under published names,
and beside its tensors

    golden.tokens  [1, T] int32
    golden.first   [T - 1, V] float32, logits of the token after the next
    golden.second  [V] float32, of the token behind the best one of golden.first[-1]

The logits are those of transformers' `MtpModel`, also of families that its generation does not know
it for; of Qwen4-Exp, those of the formula in SGLang's `qwen4_exp_mtp.py`, made of transformers'
layers. Every number is float64 and rounded at the end. A seed with which a choice is close, or a
reversed parameter does not show, is passed over.
"""

import argparse
import copy

import torch
from golden_cases import CASES
from make_golden import (
    HERE,
    MIN_MARGIN,
    MIN_SENSITIVITY,
    all_float64,
    load,
    randomise,
    randomise_delta,
    relative,
    router_margin,
    to_float64,
)
from safetensors.torch import save_file
from transformers.modeling_layers import MtpModel
from transformers.models.qwen4_exp import modeling_qwen4_exp as streams

HEADS = HERE / "heads"
LENGTH = 24
# Twins whose heads are layers behind the model's (DeepSeek's names) and modules (Qwen's names).
LAYERS = (
    "deepseek_v3_groups",
    "deepseek_v32_yarn40",
    "glm4_moe_norms",
    "glm4_moe_lite_flash",
    "glm_moe_dsa_shared",
)
MODULES = ("text_top3", "qwen3_next_top3", "qwen4_exp_rows")
AS_LAYER = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
AS_MODULE = {
    "mtp_block.": "layers.0.",
    "post_norm.": "norm.",
    "eh_proj.": "fc.",
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
}


class Head(torch.nn.Module):
    """transformers' head: ``head(h [1, T, C], tokens [1, T]) -> what is read next, logits``."""

    def __init__(self, main):
        super().__init__()
        config = main.config.get_text_config()
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mtp_mlp_layer_types = ["sparse"]
        self.mtp = MtpModel(main, 1)
        # It takes the first norm of the last layer, which in Qwen3-Next is a delta net's.
        norm = type(main.get_decoder().norm)
        for name in ("enorm", "hnorm", "post_norm"):
            setattr(self.mtp.layers[0], name, norm(config.hidden_size, eps=config.rms_norm_eps))
        # GLM-5's layers return what their indexer chose too.
        block = self.mtp.layers[0].mtp_block
        block.register_forward_hook(lambda module, inputs, output: _state(output))
        self._main = [main]

    def named(self, layer: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors under published names; layer: Of the head, None for a module."""
        start, renamed = ("mtp.", AS_MODULE) if layer is None else (None, AS_LAYER)
        found = {}
        for name, tensor in self.mtp.layers[0].state_dict().items():
            for part, other in renamed.items():
                if name.startswith(part):
                    name = other + name.removeprefix(part)
                    break
            found[(start or f"model.layers.{layer}.") + name] = tensor
        return found

    def entering(self, h):
        return self._main[0].get_decoder().norm(h)

    def forward(self, read, tokens):
        positions = torch.arange(1, tokens.shape[1] + 1)[None]
        read = self.mtp.forward_layer(0, read, positions, None, input_ids=tokens)
        return read, self._main[0].lm_head(read)


class StreamsHead(torch.nn.Module):
    """SGLang's head of Qwen4-Exp, with the same methods."""

    def __init__(self, main):
        super().__init__()
        config = copy.deepcopy(main.config.get_text_config())
        config.num_hidden_layers, config.ple_layer_ids = 1, []
        config.layer_types = ["indexed_attention"]
        C, S, eps = config.hidden_size, config.hc_count, config.rms_norm_eps
        self.streams = S
        self.fc_embedding = torch.nn.Linear(C, C, bias=False)
        self.fc_hidden = torch.nn.Linear(C, C, bias=False)
        self.pre_fc_norm_embedding = streams.Qwen4ExpTextRMSNorm(C, eps=eps)
        self.pre_fc_norm_hidden = streams.Qwen4ExpTextRMSNorm(S * C, eps=eps)
        self.model = streams.Qwen4ExpTextModel(config)
        self.model.embed_tokens = torch.nn.Identity()
        self.model.rotary_emb = main.get_decoder().rotary_emb
        self._main = [main]

    def named(self, layer: int | None) -> dict[str, torch.Tensor]:
        return {"mtp." + k.removeprefix("model."): v for k, v in self.state_dict().items()}

    def entering(self, h):
        return h

    def forward(self, read, tokens):
        embedded = self._main[0].get_input_embeddings()(tokens)
        own = self.fc_hidden(self.pre_fc_norm_hidden(read).unflatten(-1, (self.streams, -1)))
        x = own + self.fc_embedding(self.pre_fc_norm_embedding(embedded)).unsqueeze(-2)
        kept = []
        (block,) = self.model.layers
        hooks = [
            block.register_forward_pre_hook(lambda module, inputs: (x.flatten(-2), *inputs[1:])),
            block.register_forward_hook(lambda module, inputs, output: kept.append(output)),
        ]
        mixed = self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        return kept[0], self._main[0].lm_head(mixed)


def _state(output):
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def last_layer(main, tokens):
    """Return the output of the model's last layer."""
    kept = []
    hook = (
        main.get_decoder()
        .layers[-1]
        .register_forward_hook(lambda module, inputs, output: kept.append(_state(output)))
    )
    main(input_ids=tokens, use_cache=False)
    hook.remove()
    return kept[0]


@torch.no_grad()
def drafted(head, read, tokens):
    """Return the logits behind all pairs, and those of a second draft."""
    after, first = head(read, tokens)
    read = torch.cat([read, after[:, -1:]], dim=1)
    tokens = torch.cat([tokens, first[:, -1:].argmax(-1)], dim=1)
    return first[0], head(read, tokens)[1][0, -1]


@torch.no_grad()
def weakest_parameter(head, read, tokens, truth) -> tuple[str, float]:
    """Return the parameter of whose reversal the logits show least, and how much."""
    shared = set(map(id, head._main[0].parameters()))
    moved = {}
    for name, parameter in head.named_parameters():
        if id(parameter) not in shared and parameter.shape[0] > 1:
            original = parameter.data
            parameter.data = original.flip(0)
            moved[name] = relative(drafted(head, read, tokens)[0], truth)
            parameter.data = original
    return min(moved.items(), key=lambda item: item[1])


def make(name: str, seed: int = 1) -> None:
    case = CASES[name]
    main = load(HERE / name, case)
    generator = torch.Generator().manual_seed(seed)
    head = (StreamsHead if case.family.startswith("qwen4_exp") else Head)(main)
    shared = {k: v.clone() for k, v in main.state_dict().items()}
    fill = randomise_delta if name in MODULES else randomise
    fill(head, case, generator)
    main.load_state_dict(shared)
    for array in head.state_dict().values():
        array.copy_(array.to(case.dtype))
    main.load_state_dict(shared)
    layer = None if name in MODULES else main.config.get_text_config().num_hidden_layers
    stored = {k: v.to(case.dtype).contiguous() for k, v in head.named(layer).items()}
    ids = case.text["vocab_size"] - case.reserved
    tokens = torch.randint(ids, (1, LENGTH), generator=generator)
    to_float64(main)
    head.double().eval()
    with all_float64():
        read = head.entering(last_layer(main, tokens)[:, :-1])
        first, second = drafted(head, read, tokens[:, 1:])
        margin = min(
            router_margin(main, lambda: last_layer(main, tokens))[0],
            router_margin(head, lambda: drafted(head, read, tokens[:, 1:]))[0],
        )
        weakest = weakest_parameter(head, read, tokens[:, 1:], first)
    assert first.dtype == torch.float64
    assert torch.isfinite(first).all()
    print(name, seed, margin, weakest, float(first.abs().max()))
    if margin < MIN_MARGIN or weakest[1] < MIN_SENSITIVITY:
        return make(name, seed + 1)
    golden = {"tokens": tokens.int(), "first": first.float(), "second": second.float()}
    stored |= {f"golden.{key}": value for key, value in golden.items()}
    HEADS.mkdir(exist_ok=True)
    file = HEADS / f"{name}.safetensors"
    save_file(stored, file, metadata={"format": "pt"})
    file.chmod(0o644)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join((*LAYERS, *MODULES))}")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for name in args.cases or (*LAYERS, *MODULES):
        make(name)


if __name__ == "__main__":
    main()
