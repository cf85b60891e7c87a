"""Oracle: sums by hand."""

import json

from mlx_moeflux.experts.telemetry.stats import ExpertStats, LayerStats


def filled():
    stats = ExpertStats((3, 4))
    stats.layers[3] = LayerStats(5, 10, 6, 4, 4, 400, 0.5, 0.25, 1.0, 2)
    stats.layers[4] = LayerStats(7, 10, 9, 1, 2, 200, 0.25, 0.5, 2.0, 0)
    return stats


def test_total():
    total = filled().total
    assert total == LayerStats(7, 20, 15, 5, 6, 600, 0.75, 0.75, 3.0, 2)
    assert total.hit_rate == 0.75
    assert ExpertStats((1,)).total.hit_rate == 1.0


def test_reset_keeps_the_object_and_the_marks():
    stats = filled()
    stats.mark_lossy("experts_per_token 4 of 8")
    stats.mark_lossy("experts_per_token 4 of 8")
    stats.reset()
    assert stats.total == LayerStats()
    assert stats.lossy == ["experts_per_token 4 of 8"]


def test_since_a_snapshot():
    stats = filled()
    before = stats.snapshot()
    stats.layers[3].reads += 3
    stats.layers[4].stall_seconds += 0.5
    assert before.total.reads == 6
    difference = stats.since(before)
    assert difference.layers[3] == LayerStats(reads=3)
    assert difference.layers[4] == LayerStats(stall_seconds=0.5)
    assert stats.total.reads == 9


def test_as_dict_is_plain():
    stats = filled()
    stats.mark_lossy("x")
    plain = json.loads(json.dumps(stats.as_dict()))
    assert plain["total"]["bytes_read"] == 600
    assert plain["layers"]["3"]["hit_rate"] == 0.6
    assert plain["lossy"] == ["x"]


def test_one_line():
    stats = filled()
    stats.layers[3].bytes_read = 1_234_000_000
    assert str(stats) == (
        "7 tokens, hit rate 75.0 % of 20, 1.234 GB in 6 reads, I/O 0.75 s, stalls 0.75 s, "
        "compute 3.00 s"
    )
    stats.mark_lossy("experts_per_token 4 of 8")
    assert str(stats).endswith(", lossy: experts_per_token 4 of 8")


def test_text_json_and_metrics_read_one_table():
    stats = filled()
    stats.layers[5] = LayerStats(tokens=7)  # it did not look
    stats.layers[3].bytes_read = 1_234_000_000
    stats.mark_lossy("kv_bits 4")
    table = stats.table()
    stats.layers[3].hits = 0  # later
    assert table.brief().splitlines() == [
        "layer    hits   misses    read MB    wait s",
        "3       60.0%        4    1,234.0      0.25",
        "4       90.0%        1        0.0      0.50",
        "total   75.0%        5    1,234.0      0.75",
    ]
    heading, *rows = (line.split() for line in table.full().splitlines())
    assert [len(row) for row in rows] == [len(heading)] * 4
    plain = json.loads(json.dumps(table.as_dict()))
    for row in rows:
        values = plain["total"] if row[0] == "total" else plain["layers"][row[0]]
        texts = [row[heading.index(name)].replace(",", "") for name in heading[1:]]
        assert [float(text) for text in texts] == [values[name] for name in heading[1:]]
    metrics = table.metrics()
    assert metrics["expert_hits_total"] == ("counter", "Experts found in memory.", 15)
    assert metrics["expert_hit_rate"][::2] == ("gauge", plain["total"]["hit_rate"])
    assert {value in plain["total"].values() for _, _, value in metrics.values()} == {True}


def test_reads_ahead_are_a_phrase_without_the_marks():
    stats = filled()
    assert stats.table().read_ahead() is None
    stats.layers[3] = LayerStats(prefetches=6, prefetched_hits=4, proposed=34, foreseen=13)
    stats.mark_lossy("kv_bits 4")
    phrase = "read ahead 6, of which 4 used; foreseen 38.2 % of 34"
    assert stats.table().read_ahead() == phrase
    assert str(stats).endswith(f", {phrase}, lossy: kv_bits 4")
