"""The regular expressions by which published tokenizers cut a text, as their files spell them.

Each takes a time that is linear in the text, also where the text repeats its worst characters. A
comment names the models of data/catalogue.json whose file has the expression.

Sources: tokenizer.json of the models named (September to November 2026, as llama.cpp's
`src/llama-vocab.cpp`, `tiktoken` and public copies quote it); Kimi's `tokenization_kimi.py`.
"""

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANK = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _SHORT + "?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _SHORT + "?"
)
_NO_HAN = _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")

# GPT-2; what the library's ByteLevel cuts by.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GLM-4.5 to GLM-5.2; Llama 3; OpenAI's cl100k.
CL100K = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANK
# gpt-oss (OpenAI's o200k), MiniMax-M2.
O200K = _CASED + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANK
# Qwen2 to Qwen3, Qwen3-Next, Qwen3-Coder; Laguna's second.
QWEN2 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANK
# Qwen3.5, Qwen3.6, Qwen3.8.
QWEN35 = _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANK
# Kimi-K2.
KIMI = r"[\p{Han}]+|" + _NO_HAN + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANK
# DeepSeek-V3, one after the other.
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANK,
)

PATTERNS = frozenset((
    GPT2, CL100K, O200K, QWEN2, QWEN35, KIMI, *DEEPSEEK,
    # DeepSeek's tokenizer.json has line ends where the text above, as in GGUF files, has escapes.
    DEEPSEEK[-1].replace(r"\r\n", "\r\n"),
    # Laguna's first.
    r"(?:\r?\n)+(?!\r?\n)",
    # The bundled model.
    r"(?:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\w]?\w+|\d| ?[^\s\w]+[\r\n]*" + _BLANK,
))  # fmt: skip
