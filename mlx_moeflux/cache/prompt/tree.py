"""Prompts that were read before, as a tree: a node adds tokens to those of its parent.

A node keeps the rows of its own tokens (keys, values) and the whole of what has one size
(recurrent states), so that a hundred prompts with one beginning hold that beginning once. No MLX
is needed to look a prompt up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

KEY_BYTES = 20


def child_key(parent: str, tokens: np.ndarray) -> str:
    """The name of the node that adds `tokens` (int32) to `parent`: a hash of all that is before."""
    text = parent.encode() + tokens.astype("<i4").tobytes()
    return hashlib.blake2b(text, digest_size=KEY_BYTES).hexdigest()


@dataclass(eq=False)
class Node:
    """Tokens ``[end - len(tokens), end)`` of a prompt, and the state behind them.

    arrays: As :func:`~mlx_moeflux.cache.state.spec.export` gives them for these tokens, perhaps
    with ``logits``; None while they are on disk only. experts: MoE layer id -> ids that were in
    memory. disk: "" (not there), "pending" or "stored". used: A logical clock; a parent's is later
    than its children's.
    """

    key: str
    parent: Node | None
    tokens: np.ndarray
    end: int
    has_logits: bool = False
    experts: Mapping[int, list[int]] = field(default_factory=dict)
    arrays: dict[str, Any] | None = None
    disk: str = ""
    used: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    @classmethod
    def root(cls, identity: str) -> Node:
        """Of the prompts of one model."""
        return cls(identity, None, np.zeros(0, np.int32), 0)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in (self.arrays or {}).values())

    def path(self) -> list[Node]:
        """From the root's child to this node."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def family(self) -> Iterator[Node]:
        """This node and all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def add(self, tokens: np.ndarray, **fields: Any) -> Node:
        """The child of these tokens; made if there is none."""
        key = child_key(self.key, tokens)
        if key not in self.children:
            end = self.end + len(tokens)
            self.children[key] = Node(key, self, tokens, end, **fields)
        return self.children[key]

    def remove(self) -> None:
        """Take this node, and with it all below, out of the tree."""
        if self.parent is not None:
            self.parent.children.pop(self.key, None)


class Match(NamedTuple):
    """The first `tokens` tokens of a prompt are those of `node`'s path, perhaps of a part of it."""

    node: Node
    tokens: int

    @property
    def whole(self) -> bool:
        """The prompt has all tokens of the node."""
        return self.tokens == self.node.end


def matches(root: Node, tokens: np.ndarray) -> Iterator[Match]:
    """Every node that shares tokens with a prompt, the root first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield Match(node, node.end)
        for child in node.children.values():
            common = _common(child.tokens, tokens[node.end :])
            if common == len(child.tokens):
                stack.append(child)
            elif common:
                yield Match(child, node.end + common)


def deepest(root: Node, tokens: np.ndarray) -> Node:
    """The longest node whose tokens a prompt begins with."""
    return max((m.node for m in matches(root, tokens) if m.whole), key=lambda node: node.end)


def best_start(root: Node, tokens: np.ndarray, *, cut: bool) -> Match:
    """Where to go on with a prompt: the longest beginning that leaves something to compute, or
    whose logits are known. cut: States can be truncated, so a part of a node will do."""

    def usable(match: Match) -> Match | None:
        if match.whole and (match.tokens < len(tokens) or match.node.has_logits):
            return match
        if not cut:
            return None
        return Match(match.node, min(match.tokens, len(tokens) - 1))

    found = filter(None, map(usable, matches(root, tokens)))
    return max(found, key=lambda match: (match.tokens, match.whole))


def shared(root: Node, tokens: np.ndarray) -> int:
    """How many tokens of a prompt were ever read before."""
    return max(match.tokens for match in matches(root, tokens))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n
