"""Oracle: a list of all prefixes that were entered, looked through one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moeflux.cache.prompt.tree import Node, best_start, child_key, deepest, shared

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
entries = st.lists(st.tuples(prompts, st.booleans()), max_size=8)


def ids(tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def grown(entered) -> tuple[Node, dict[tuple, bool]]:
    """The tree, and prefix -> whether its logits are known."""
    root, known = Node.root("model"), {}
    for tokens, has_logits in entered:
        parent = deepest(root, ids(tokens))
        if parent.end == len(tokens):
            continue
        parent.add(ids(tokens[parent.end :]), has_logits=has_logits)
        known[tokens] = has_logits
    return root, known


def common(a, b) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=100)
@given(entries, prompts)
def test_look_ups_are_those_of_a_list(entered, prompt):
    root, known = grown(entered)
    assert {tuple(np.concatenate([n.tokens for n in node.path()])) for node in root.family()
            if node.parent} == set(known)  # fmt: skip
    begun = [prefix for prefix in known if prompt[: len(prefix)] == prefix]
    node = deepest(root, ids(prompt))
    assert node.end == max(map(len, begun), default=0)
    assert shared(root, ids(prompt)) == max((common(p, prompt) for p in known), default=0)
    usable = [len(p) for p in begun if len(p) < len(prompt) or known[p]]
    whole = best_start(root, ids(prompt), cut=False)
    assert whole.whole
    assert whole.tokens == max(usable, default=0)
    cut = best_start(root, ids(prompt), cut=True)
    anywhere = max((min(common(p, prompt), len(prompt) - 1) for p in known), default=0)
    assert cut.tokens == max([*usable, anywhere])
    path = [token for node in cut.node.path() for token in node.tokens]
    assert tuple(path[: cut.tokens]) == prompt[: cut.tokens]


short = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@given(
    st.lists(st.tuples(short, st.just(False)), min_size=6, max_size=12),
    st.lists(st.integers(0, 11), min_size=1, max_size=6),
    short,
)
def test_look_ups_after_nodes_were_removed(entered, gone, prompt):
    """They are those of a tree that never had them."""
    root, _ = grown(entered)
    for i in gone:
        nodes = [node for node in root.family() if node.parent]
        if nodes:
            nodes[i % len(nodes)].remove()
    left = [node for node in root.family() if node.parent]
    assert root.held.nodes == len(left)
    assert all(node.rooted for node in left)
    known = [tuple(np.concatenate([n.tokens for n in node.path()])) for node in left]
    begun = [path for path in known if prompt[: len(path)] == path]
    assert deepest(root, ids(prompt)).end == max(map(len, begun), default=0)
    longest = max((common(path, prompt) for path in known), default=0)
    assert shared(root, ids(prompt)) == longest
    cut = best_start(root, ids(prompt), cut=True)
    whole = [len(path) for path in begun if path != prompt]
    assert cut.tokens == max([*whole, min(longest, len(prompt) - 1)])
    assert cut.node in (root, *left)
    assert cut.node is root or cut.node.end - len(cut.node.tokens) <= cut.tokens <= cut.node.end
    places = [root.place]
    for place in places:
        places += place.below.values()
        assert place.some.rooted
        if place.above is not None:
            assert place.nodes or len(place.below) > 1
            assert place.some.end - len(place.some.tokens) <= place.above.depth
            assert place.some.end >= place.depth
    assert len(places) <= 2 * len(left) + 1


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(("", "pending", "stored"))),
        min_size=20,
        max_size=60,
    )
)
def test_memory_is_that_of_the_nodes_used_last(uses):
    """Oracle: all nodes in a list, the least recently used first."""
    root, nodes, limit = Node.root("model"), {}, 250
    listed: list[Node] = []
    for token, other, disk in uses:
        node = nodes.get(token)
        if node is None or not node.rooted:
            node = nodes[token] = root.add(ids((token,)))
        if node.arrays is None:
            node.hold({"a": np.zeros(40 + 10 * token, np.uint8)})
        if other in nodes:
            nodes[other].disk = disk
        root.held.use(node)
        listed = [n for n in listed if n is not node] + [node]
        left, excess = [], sum(n.nbytes for n in listed) - limit
        for one in listed:
            if excess > 0 and one.disk != "pending":
                excess -= one.nbytes
            else:
                left.append(one)
        root.held.shrink(limit)
        assert [n for n in listed if n.arrays is not None] == left
        assert root.held.nbytes == sum(n.nbytes for n in left)
        assert all(n.rooted == (n.arrays is not None or n.disk == "stored") for n in listed)
        listed = left


@given(prompts, prompts)
def test_a_key_is_that_of_model_and_tokens_alone(a, b):
    keys = [child_key("model", ids(tokens)) for tokens in (a, b)]
    assert (keys[0] == keys[1]) == (a == b)
    assert child_key("other", ids(a)) != keys[0]
    assert child_key(child_key("model", ids(a)), ids(b)) != child_key("model", ids(a + b))


def test_removing_a_node_takes_what_stands_on_it():
    root, _ = grown([((1, 2), False), ((1, 2, 3), True), ((2,), False)])
    node = deepest(root, ids((1, 2, 9)))
    assert [n.end for n in node.family()] == [2, 3]
    node.remove()
    assert [n.end for n in root.family()] == [0, 1]
