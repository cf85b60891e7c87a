"""Prefix tree of processed prompts: a node adds tokens to those of its parent.

A node holds the rows of its own tokens (keys, values) and whole arrays of fixed size (recurrent
states), so prompts with a common beginning store it once. Look-ups use no MLX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

KEY_BYTES = 20


def child_key(parent: str, tokens: np.ndarray) -> str:
    """Return the key of the node that adds `tokens` (int32) to `parent`: a hash of both."""
    # A damaged file can name a parent of lone surrogates.
    text = parent.encode("utf-8", "surrogatepass") + tokens.astype("<i4").tobytes()
    return hashlib.blake2b(text, digest_size=KEY_BYTES).hexdigest()


@dataclass(eq=False)
class Node:
    """Tokens ``[end - len(tokens), end)`` of a prompt and the state after them.

    arrays: The :func:`~mlx_moeflux.cache.state.spec.export` of these tokens, perhaps with
    ``logits``; None while they are on disk only. experts: MoE layer id -> ids that were in memory.
    disk: "" (not there), "pending" or "stored". used: Logical time of the last use; a parent's is
    later than its children's.
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
        """Return the empty root for the prompts of one model."""
        return cls(identity, None, np.zeros(0, np.int32), 0)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays in memory."""
        return sum(array.nbytes for array in (self.arrays or {}).values())

    def path(self) -> list[Node]:
        """Return the nodes from the root's child to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def family(self) -> Iterator[Node]:
        """Yield this node and all its descendants."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def add(self, tokens: np.ndarray, **fields: Any) -> Node:
        """Return the child of these tokens, created if it is missing."""
        key = child_key(self.key, tokens)
        if key not in self.children:
            end = self.end + len(tokens)
            self.children[key] = Node(key, self, tokens, end, **fields)
        return self.children[key]

    def remove(self) -> None:
        """Remove this node and its descendants from the tree."""
        if self.parent is not None:
            self.parent.children.pop(self.key, None)


class Match(NamedTuple):
    """Number of first tokens that a prompt shares with the path of `node`."""

    node: Node
    tokens: int

    @property
    def whole(self) -> bool:
        """Return True if the prompt has all tokens of the node."""
        return self.tokens == self.node.end


def matches(root: Node, tokens: np.ndarray) -> Iterator[Match]:
    """Yield a match for every node that shares tokens with a prompt, the root first."""
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
    """Return the deepest node whose path is a prefix of a prompt."""
    return max((m.node for m in matches(root, tokens) if m.whole), key=lambda node: node.end)


def best_start(root: Node, tokens: np.ndarray, *, cut: bool) -> Match:
    """Return the longest match from which a prompt can continue.

    It leaves at least one token to compute unless its logits are stored. cut: States can be
    truncated, so a part of a node is usable.
    """

    def usable(match: Match) -> Match | None:
        if match.whole and (match.tokens < len(tokens) or match.node.has_logits):
            return match
        if not cut:
            return None
        return Match(match.node, min(match.tokens, len(tokens) - 1))

    found = filter(None, map(usable, matches(root, tokens)))
    return max(found, key=lambda match: (match.tokens, match.whole))


def shared(root: Node, tokens: np.ndarray) -> int:
    """Return the length of the longest prefix that a prompt shares with any stored one."""
    return max(match.tokens for match in matches(root, tokens))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n
