"""Oracle: what a policy may answer, said in its protocol."""

import pytest

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.eviction import LRU, choose_victims, make_eviction
from mlx_moeflux.experts.policies.prefetch import LookAhead, make_prefetch, proposed

NAN = float("nan")


@pytest.mark.parametrize(("make", "kind"), [(make_eviction, LRU), (make_prefetch, LookAhead)])
def test_a_class_is_no_policy(make, kind):
    with pytest.raises(InputError, match=f"{kind.__name__} is a class; pass an instance"):
        make(kind)
    policy = kind()
    assert make(policy) is policy


def test_a_method_with_other_arguments_is_refused_before_it_is_called():
    class Short(LRU):
        def touch(self, layer, experts): ...

    class Renamed(LRU):
        def choose(self, layer, count, *, resident, kept): ...

    class Open(LRU):
        def touch(self, *arguments): ...

        def choose(self, layer, count, **others): ...

    called = r"the eviction Short is called as touch\(layer, experts, last, uses\): too many"
    with pytest.raises(InputError, match=called):
        make_eviction(Short())
    called = r"called as choose\(layer, count, resident=, protected=\): missing .* 'kept'"
    with pytest.raises(InputError, match=called):
        make_eviction(Renamed())
    policy = Open()
    assert make_eviction(policy) is policy
    policy.reset = None
    with pytest.raises(InputError, match="the eviction Open has no 'reset'"):
        make_eviction(policy)


class Answering:
    """A policy whose every method returns `answer`."""

    name = "mine"

    def __init__(self, answer):
        self.choose = self.propose = lambda *_, **__: answer


@pytest.mark.parametrize("answer", [None, NAN, 3, [NAN], [1.0], ["1"], [[1]], [1, 1], [], [9]])
def test_a_wrong_answer_of_an_eviction_names_it(answer):
    with pytest.raises(
        InputError, match=r"eviction mine chose .* in layer 4; expected 1 different"
    ):
        choose_victims(Answering(answer), 4, 1, resident={1, 2, 3}, protected={3})
    assert choose_victims(Answering((2,)), 4, 1, resident={1, 2, 3}, protected={3}) == [2]


@pytest.mark.parametrize("answer", [None, NAN, 3, [NAN], [1.0], ["1"], [1, 1], [8], [-1]])
def test_a_wrong_answer_of_a_prefetcher_names_it(answer):
    with pytest.raises(InputError, match=r"prefetch mine proposed .* for layer 2; .* below 8"):
        proposed(Answering(answer), 2, (), 8)
    assert proposed(Answering((5, 1)), 2, (), 8) == [5, 1]
