"""Oracle: constants that transformers 5.23 with torch 2.13 computed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import ConfigError, ShapeError
from mlx_moeflux.models.ngrams import NgramHashes, _is_prime, _primes_from, check_tables
from mlx_moeflux.models.qwen4_exp_config import MOST_ROWS
from mlx_moeflux.models.shapes import SHAPES

PUBLISHED, TINY = SHAPES["qwen3.8-flash-next"], SHAPES["qwen4-exp-tiny"]
SMALL = replace(
    TINY,
    ple_layer_ids=(1, 2),
    ple_embed_dim=60,
    heads_per_ngram=2,
    make_ngram_vocab_size_divisible_by=8,
    eos_token_id=(1023, 5),
)
TOKENS = [
    [3, 17, 1023, 8, 1023, 1023, 900, 2, 5, 41],
    [1000, 1001, 1002, 1003, 0, 1023, 1, 1022, 7, 7],
]


def history(config, tokens) -> np.ndarray:
    """The tokens of sequences after their context, which is empty."""
    tokens = np.array(tokens)
    before = np.full((len(tokens), config.ngram_size - 1), config.stop_token)
    return np.concatenate([before, tokens], axis=1)


# Source: `_find_nth_prime_after(20_000_000 - 1, n)`, n = 1 to 32.
PRIMES = [
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
    20000213, 20000221, 20000243, 20000269, 20000287, 20000297, 20000303, 20000311,
    20000327, 20000329, 20000339, 20000353, 20000359, 20000377, 20000389, 20000429,
]  # fmt: skip
# Source: `_build_layer_multipliers(248320, 3, index, 1234)`, index = 0, 1.
MULTIPLIERS = [
    [23703573157769, 20109073645365, 8052911324071],
    [3352040966061, 19752442147475, 10742103100073],
]


@pytest.mark.parametrize("index", [0, 1])
def test_the_published_constants(index):
    found = NgramHashes(PUBLISHED, index)
    own = PRIMES[16 * index : 16 * index + 16]
    assert found.sizes.tolist() == own
    assert found.offsets.tolist() == [sum(own[:i]) for i in range(16)]
    assert found.multipliers.tolist() == MULTIPLIERS[index]
    assert found.rows == [320001536, 320005120][index]
    assert found.context == 2


def test_primes():
    limit = 100_000
    sieve = np.ones(limit, bool)
    sieve[:2] = False
    for n in range(2, 317):
        sieve[n * n :: n] = False
    assert list(filter(_is_prime, range(limit))) == np.flatnonzero(sieve).tolist()
    assert list(islice(_primes_from(1), 3)) == [2, 3, 5]
    # Squares of primes, Carmichael numbers, and what deceives the witnesses 2 to 23.
    assert not any(map(_is_prime, [41**2, 1009**2, 561, 825265, 3825123056546413051]))
    assert all(map(_is_prime, [(1 << 61) - 1, (1 << 31) - 1]))
    assert next(_primes_from(MOST_ROWS)) == 1099511627791


# Rows of transformers' `Qwen4ExpTextNGramEmbedding` (its ids are stored by a replaced
# `ngram_embedding`), as (config, index of the layer, rows of the table, tokens, row numbers).
HASHED = [
    (SMALL, 0, 408, TOKENS, [
        [[20, 143, 199, 343], [43, 197, 243, 355], [96, 167, 246, 363], [74, 109, 209, 356],
         [74, 110, 257, 403], [46, 109, 224, 319], [89, 140, 259, 359], [41, 182, 270, 372],
         [36, 168, 213, 373], [58, 195, 256, 398]],
        [[21, 107, 275, 341], [78, 135, 264, 316], [87, 156, 242, 364], [7, 129, 243, 314],
         [67, 155, 255, 332], [16, 170, 238, 325], [87, 121, 220, 338], [25, 165, 214, 310],
         [76, 194, 228, 396], [89, 145, 219, 313]],
    ]),
    (SMALL, 1, 480, TOKENS, [
        [[34, 129, 309, 472], [90, 164, 234, 410], [101, 213, 265, 463], [65, 185, 262, 444],
         [24, 125, 233, 395], [86, 177, 227, 376], [14, 163, 316, 351], [65, 220, 283, 443],
         [57, 188, 250, 428], [91, 140, 325, 450]],
        [[74, 166, 237, 461], [39, 134, 271, 442], [26, 179, 336, 407], [63, 155, 280, 362],
         [9, 112, 277, 411], [102, 144, 303, 452], [19, 113, 344, 362], [49, 186, 281, 458],
         [2, 198, 265, 370], [91, 183, 304, 385]],
    ]),
    (replace(SMALL, ngram_size=4, seed=7), 1, 840, TOKENS[:1], [
        [[23, 155, 393, 450, 667, 758], [101, 191, 312, 475, 617, 784],
         [30, 167, 340, 530, 644, 698], [5, 201, 316, 525, 671, 756],
         [125, 229, 361, 407, 669, 772], [7, 189, 335, 413, 627, 762],
         [41, 153, 358, 404, 661, 807], [92, 164, 341, 398, 566, 724],
         [44, 183, 322, 406, 609, 696], [104, 209, 343, 456, 603, 694]],
    ]),
    (PUBLISHED, 0, 320001536, [[248044, 9707, 11, 1879, 248319]], [
        [[9663979, 26558231, 56120240, 74755659, 80459717, 109265651, 132697467, 151022725,
          170054832, 192967038, 200687722, 225763581, 259275737, 272983544, 297596484, 300986548],
         [16410909, 39682429, 55103279, 60931720, 87006904, 116506179, 131512017, 152932897,
          169641436, 182022480, 209277433, 237891023, 256841529, 277007269, 290665954, 300984276],
         [18158303, 36390029, 45652312, 70783524, 98191154, 114024957, 127804916, 159566246,
          175132467, 192583600, 217919476, 237199054, 259336807, 261799367, 289359313, 307699687],
         [6380558, 26411572, 56460672, 78566983, 94693008, 106742196, 124822692, 148942556,
          164226950, 190352573, 210933682, 238908951, 242182004, 265475238, 299910982, 312121804],
         [16675733, 34981638, 58520822, 72388198, 97407625, 106683158, 131473731, 152831969,
          173894959, 182137825, 217076457, 231337796, 246512297, 262739468, 288382612, 318351987]],
    ]),
    # Products of ids that no vocabulary has wrap.
    (SMALL, 0, 408, [[2147483647, 2147483646, 5, 1023, 2000000000]], [
        [[60, 170, 226, 353], [32, 171, 232, 381], [14, 135, 221, 396], [36, 115, 223, 386],
         [44, 170, 264, 394]],
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "index", "rows", "tokens", "expected"), HASHED)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_are_transformers(config, index, rows, tokens, expected, dtype):
    hashes = NgramHashes(config, index)
    found = hashes(history(config, tokens).astype(dtype))
    assert hashes.rows == rows
    assert found.dtype == np.int64
    assert found.tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_that_follow_each_other_are_the_whole(size):
    config = replace(SMALL, ngram_size=size)
    hashes = NgramHashes(config, 1)
    rng = np.random.default_rng(size)
    # Every third token or so ends a context.
    tokens = np.where(rng.random((3, 40)) < 0.3, 1023, rng.integers(0, 1024, (3, 40)))
    whole, fed = hashes(history(config, tokens)), history(config, tokens)
    cuts = [0, 1, 2, 3, 3, 11, 12, 40]
    parts = [hashes(fed[:, a : b + size - 1]) for a, b in pairwise(cuts)]
    assert parts[3].shape == (3, 0, (size - 1) * 2)
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    own = whole - hashes.offsets
    assert ((own >= 0) & (own < hashes.sizes)).all()


def test_what_lies_before_a_stop_token_changes_nothing():
    hashes = NgramHashes(SMALL, 0)
    rows = [hashes(np.array([[first, 1023, 8, 9]])) for first in (3, 4)]
    assert np.array_equal(rows[0][:, 0], rows[1][:, 0])
    # The n-gram of three tokens ends with the stop token itself: it reads what lies before.
    others = [hashes(np.array([[7, first, 1023]])) for first in (3, 4)]
    assert (others[0] != others[1]).any()


@pytest.mark.parametrize("shape", [(4,), (2, 1), (1, 2, 3)])
def test_another_shape_of_history(shape):
    with pytest.raises(ShapeError, match=r"^[^\n]*expected \[B, 2 \+ T\]\.$"):
        NgramHashes(TINY, 0)(np.zeros(shape, np.int64))


def test_the_constants_need_no_mlx():
    code = "import sys, mlx_moeflux.models.ngrams; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def table(*rows: int, width: int = 32, parts=("weight",)) -> list[dict[str, TensorRef]]:
    return [
        {part: TensorRef(f"shard_{n}.{part}", Path("x"), 0, "F32", (each, width)) for part in parts}
        for n, each in enumerate(rows)
    ]


@pytest.mark.parametrize(
    "tables",
    [
        {1: table(640)},
        {1: table(160, 160, 160, 160)},
        {1: table(600, 40)},
        {1: table(640, width=4, parts=("weight", "scales", "biases"))},
    ],
)
def test_tables_that_fit(tables):
    check_tables(tables, TINY, "config.json")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "layer 1 has no table of n-grams, but 'ple_layer_ids' is [2]"),
        ({0: table(640), 1: table(640)}, "layer 0 has a table of n-grams, but"),
        ({1: table(640), 9: table(640)}, "layer 9 has a table of n-grams, but"),
        ({1: table(160, 160, 160)}, "a table of 640 rows, but its 3 shards have 480"),
        ({1: table(630)}, "a table of 640 rows, but its 1 shards have 630"),
        ({1: table(640, width=16)}, "rows of 32 numbers, but 'shard_0.weight' has 16"),
    ],
)
def test_tables_that_do_not(tables, message):
    with pytest.raises(ConfigError, match=r"^config\.json: [^\n]*$") as error:
        check_tables(tables, TINY, "config.json")
    assert message in str(error.value)
