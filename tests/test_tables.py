"""Oracle: what the commands print, and the pages as they lie there."""

from __future__ import annotations

import re

import pytest

from mlx_moeflux.checkpoint.catalogue import catalogue
from mlx_moeflux.cli import main
from mlx_moeflux.errors import MemoryBudgetError
from mlx_moeflux.experts.budget import parse_budget, slots_for_budget
from mlx_moeflux.measure.models import known_sizes
from tools import tables

PAGES = {page.name: page.read_text(encoding="utf-8") for page in tables.PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_that_the_script_writes(page):
    assert tables.written(PAGES[page]) == PAGES[page], "run python -m tools.tables"


def test_each_table_is_on_one_page():
    found = [mark[1] for text in PAGES.values() for mark in tables.MARK.finditer(text)]
    assert sorted(found) == sorted(tables.TABLES)
    assert sum(text.count("tools.tables") for text in PAGES.values()) == len(found)


def test_what_differs_is_written_anew():
    page = PAGES["README.md"]
    for old, new in (("| gpt-oss-20b |", "| gpt-oss-21b |"), ("Mac mini", "Mac maxi")):
        assert old in page
        assert tables.written(page.replace(old, new)) == page
    with pytest.raises(KeyError, match="'speed'"):
        tables.written(page.replace("tools.tables: speeds", "tools.tables: speed"))


def test_speeds_and_sizes_are_those_of_the_command(capsys):
    """Compare the column of a Mac with what ``models`` prints for it."""
    column = 1 + tables.MACS.index(tables.EXAMPLE)
    assert main(["models", *tables.FLAGS.split()]) == 0
    printed = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in tables.speeds().splitlines()]
    assert len(rows) == 3 + len(tables.SHOWN)
    for name, row in zip(tables.SHOWN, rows[3:], strict=True):
        line = next(line for line in printed.splitlines() if line.split()[0] == name)
        assert re.search(rf"  {re.escape(row[column].strip('*'))}  ", line), (row, line)
        assert catalogue()[name].title == row[0]


@pytest.mark.parametrize("name", ["budgets", "larger-budgets"])
def test_the_least_budgets_are_enough_and_little_more(name):
    sizes = {model.title: known_sizes(model) for model in catalogue().values()}
    for line in tables.TABLES[name]().splitlines()[2:]:
        titles, *_, least = line.strip("| ").split(" | ")
        for title in titles.split(", "):
            one = sizes[title]
            experts = {"num_experts": one.num_experts, "experts_per_token": one.experts_per_token}
            nbytes = parse_budget(least, one.expert_bytes)
            assert nbytes is not None
            slots = slots_for_budget(nbytes, one.blocks, **experts)
            assert min(slots.values()) == one.experts_per_token
            with pytest.raises(MemoryBudgetError):
                slots_for_budget(nbytes * 99 // 100, one.blocks, **experts)


def test_the_page_shows_the_commands_of_its_examples():
    page, repository = PAGES["getting-started.md"], catalogue()[tables.PLANNED].repository
    assert f"\nmlx_moeflux models {tables.FLAGS}\n" in page
    assert f"\nmlx_moeflux plan {repository} {tables.FLAGS}\n" in page
