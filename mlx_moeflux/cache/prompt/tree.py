"""Prefix tree of processed prompts: a node adds tokens to those of its parent.

A node holds the rows of its own tokens (keys, values) and whole arrays of fixed size (recurrent
states), so prompts with a common beginning store it once. Look-ups use no MLX, and take as long as
the prompt is, however many nodes there are: beside the nodes stands a radix tree of their tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
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


class Held:
    """The arrays in memory of the nodes of any number of trees, the least recently used first.

    nodes: Number of nodes with and without arrays, roots excluded. nbytes: Of all arrays.
    """

    def __init__(self):
        self.nodes = self.nbytes = 0
        self._sizes: OrderedDict[Node, int] = OrderedDict()

    def put(self, node: Node) -> None:
        """Enter a node whose arrays came or changed; it is the most recently used."""
        self.drop(node)
        self._sizes[node] = node.nbytes
        self.nbytes += node.nbytes

    def drop(self, node: Node) -> None:
        """Remove a node, if it is here."""
        self.nbytes -= self._sizes.pop(node, 0)

    def use(self, node: Node) -> None:
        """Note that a node is used, if it is here."""
        if node in self._sizes:
            self._sizes.move_to_end(node)

    def shrink(self, limit: int) -> None:
        """Free the least recently used arrays above `limit` bytes.

        Stored nodes lose their arrays, leaves that are not on disk are removed, and nodes that are
        being written stay.
        """
        staying = []
        while self.nbytes > limit and self._sizes:
            node = next(iter(self._sizes))
            if node.disk == "stored":
                node.free()
            elif not node.disk and not node.children:
                node.remove()
            else:
                staying.append((node, self._sizes.pop(node)))
        for node, size in reversed(staying):
            self._sizes[node] = size
            self._sizes.move_to_end(node, last=False)


class Place:
    """A vertex of the radix tree: tokens after which nodes end, or prompts differ.

    edge: The tokens behind those of `above`. depth: Number of all its tokens. nodes: Those that end
    here. some: One of these, else one below; it has all tokens of the edge as its own, because no
    node ends inside an edge. below: First token of the edge -> vertex.
    """

    def __init__(self, above: Place | None, edge: np.ndarray, depth: int, some: Node):
        self.above, self.edge, self.depth, self.some = above, edge, depth, some
        self.nodes: list[Node] = []
        self.below: dict[int, Place] = {}

    def enter(self, node: Node) -> Place:
        """Add a node that begins here; return the vertex at its end."""
        place, tokens = self, node.tokens
        while len(tokens):
            following = place.below.get(int(tokens[0]))
            if following is None:
                following = Place(place, tokens, node.end, node)
                place.below[int(tokens[0])] = following
            common = _common(following.edge, tokens)
            place = following if common == len(following.edge) else following._divided(common)
            tokens = tokens[common:]
        place.nodes.append(node)
        place.some = place.nodes[0]
        return place

    def leave(self, node: Node) -> None:
        """Remove a node that ends here and has no children, and vertices that it alone needed."""
        self.nodes.remove(node)
        place, begin = self, node.end - len(node.tokens)
        while place.depth > begin:
            above = place.above
            assert above is not None
            if not place.nodes and len(place.below) < 2:
                del above.below[int(place.edge[0])]
                for only in place.below.values():
                    only.above, only.edge = above, np.concatenate([place.edge, only.edge])
                    above.below[int(only.edge[0])] = only
            elif place.some is node:
                place.some = (place.nodes or [one.some for one in place.below.values()])[0]
            place = above

    def _divided(self, length: int) -> Place:
        """Return a new vertex after `length` tokens of the edge."""
        assert self.above is not None
        begin, end = self.edge[:length], self.edge[length:]
        middle = Place(self.above, begin, self.depth - len(end), self.some)
        self.above.below[int(begin[0])] = middle
        middle.below[int(end[0])] = self
        self.above, self.edge = middle, end
        return middle


@dataclass(eq=False)
class Node:
    """Tokens ``[end - len(tokens), end)`` of a prompt and the state after them.

    held: Accounts for its arrays, and for those of all nodes that stand on the same root. experts:
    MoE layer id -> ids that were in memory. disk: "" (not there), "pending" or "stored".
    """

    key: str
    parent: Node | None
    tokens: np.ndarray
    end: int
    held: Held
    has_logits: bool = False
    experts: Mapping[int, list[int]] = field(default_factory=dict)
    disk: str = ""
    children: dict[str, Node] = field(default_factory=dict)
    place: Place = field(init=False, repr=False)
    _arrays: dict[str, Any] | None = None

    @classmethod
    def root(cls, identity: str, held: Held | None = None) -> Node:
        """Return the empty root for the prompts of one model."""
        root = cls(identity, None, np.zeros(0, np.int32), 0, held or Held())
        root.place = Place(None, root.tokens, 0, root)
        root.place.nodes.append(root)
        return root

    @property
    def arrays(self) -> dict[str, Any] | None:
        """The :func:`~mlx_moeflux.cache.state.spec.export` of its tokens, perhaps with ``logits``;
        None while they are on disk only."""
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays in memory."""
        return sum(array.nbytes for array in (self._arrays or {}).values())

    @property
    def rooted(self) -> bool:
        """Return True until it is removed from the tree."""
        return self in self.place.nodes

    def hold(self, arrays: dict[str, Any]) -> None:
        """Take arrays, in place of earlier ones."""
        self._arrays, self.has_logits = arrays, "logits" in arrays
        self.held.put(self)

    def free(self) -> None:
        """Drop the arrays from memory."""
        self._arrays = None
        self.held.drop(self)

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

    def add(self, tokens: np.ndarray, *, has_logits: bool = False) -> Node:
        """Return the child of these tokens, created if it is missing."""
        key = child_key(self.key, tokens)
        if key not in self.children:
            node = Node(key, self, tokens, self.end + len(tokens), self.held, has_logits)
            node.place = self.place.enter(node)
            self.children[key] = node
            self.held.nodes += 1
        return self.children[key]

    def remove(self) -> None:
        """Remove this node and its descendants from the tree, unless it has left already."""
        if self.parent is None or not self.rooted:
            return
        del self.parent.children[self.key]
        for node in reversed(list(self.family())):
            node.place.leave(node)
            node.free()
            self.held.nodes -= 1


class Match(NamedTuple):
    """Number of first tokens that a prompt shares with the path of `node`."""

    node: Node
    tokens: int

    @property
    def whole(self) -> bool:
        """Return True if the prompt has all tokens of the node."""
        return self.tokens == self.node.end


def matches(root: Node, tokens: np.ndarray) -> Iterator[Match]:
    """Yield the nodes with whose whole path a prompt begins, the shortest first, the root too; then
    one that shares more tokens with it than these, or as many, if there is one."""
    place = root.place
    while True:
        yield from (Match(node, place.depth) for node in place.nodes)
        rest = tokens[place.depth :]
        following = place.below.get(int(rest[0])) if len(rest) else None
        if following is None:
            if not place.nodes:
                yield Match(place.some, place.depth)
            return
        common = _common(following.edge, rest)
        if common < len(following.edge):
            yield Match(following.some, place.depth + common)
            return
        place = following


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
