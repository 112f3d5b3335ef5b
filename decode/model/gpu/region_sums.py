"""A pass over compiled code: a layer's last sum is computed by the next layer, in the kernel of its norm.

Layers are regions (decode/model/regions.py), whose results are tensors: the sum of residual and MLP at the end of each
was a kernel of its own. Here a region gives the two terms, and takes two.
"""

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

INVOKE = torch.ops.higher_order.invoke_subgraph


def hand_on_terms(graph: Graph) -> None:
    """Changes `graph`, as dynamo traced it, and its regions, where regions that end in a sum follow each other."""
    calls: list[Any] = [node for node in graph.nodes if node.target is INVOKE]
    owner: Any = graph.owning_module
    regions = {call.args[0].target: owner.get_submodule(call.args[0].target) for call in calls}
    sums = {name: last_sum(region.graph) for name, region in regions.items()}
    calls = [call for call in calls if sums[call.args[0].target] is not None]
    made = {call: result_of(call) for call in calls}
    results = {result: call for call, result in made.items() if result is not None}
    # which argument of each region is the sum of the one before
    places = {
        call.args[0].target: at
        for call in calls
        for at, given in enumerate(call.args)
        if given in results
    }
    for name in places:
        take_two(regions[name].graph, places[name] - 2)
    for name in {call.args[0].target for call in calls}:
        give_two(regions[name].graph, sums[name])
    for call in calls:
        at = places.get(call.args[0].target)
        if at is not None:
            given = call.args[at]
            with graph.inserting_before(call):
                zeros = graph.call_function(torch.zeros_like, (given,))
            call.args = (*call.args, zeros)
    for result, call in results.items():
        with graph.inserting_after(result):
            second = graph.call_function(operator.getitem, (call, 1))
        with graph.inserting_after(second):
            total = graph.call_function(operator.add, (result, second))
        keeps = partial(operator.is_not, total)
        result.replace_all_uses_with(total, delete_user_cb=keeps)
        for user in list[Any](total.users):
            at = places.get(user.args[0].target) if user in made else None
            if at is not None and user.args[at] is total:
                user.args = (*user.args[:at], result, *user.args[at + 1 : -1], second)
    graph.eliminate_dead_code()


def last_sum(graph: Any) -> Node | None:
    """The one result of a region, if it is the sum of two tensors that it computes."""
    [given] = graph.output_node().args
    given = list(given) if isinstance(given, list | tuple) else [given]
    [node] = given if len(given) == 1 else [None]
    if not isinstance(node, Node) or node.target is not operator.add:
        return None
    terms: tuple[Any, ...] = node.args
    computed = all(isinstance(x, Node) and x.op.startswith("call_") for x in terms)
    return node if computed and terms[0] is not terms[1] else None


def result_of(call: Any) -> Node | None:
    """The node that takes the one result of a call."""
    users = list(call.users)
    return users[0] if len(users) == 1 and users[0].target is operator.getitem else None


def take_two(graph: Any, at: int) -> None:
    """The argument number `at` of a region becomes the sum of two."""
    inputs = graph.find_nodes(op="placeholder")
    given = inputs[at]
    with graph.inserting_after(inputs[-1]):
        second = graph.placeholder("second_term")
    with graph.inserting_after(second):
        total = graph.call_function(operator.add, (given, second))
    given.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    graph.owning_module.recompile()


def give_two(graph: Any, total: Any) -> None:
    """A region gives the terms of its last sum."""
    graph.output_node().args = (tuple(total.args),)
    graph.eliminate_dead_code()
    graph.owning_module.recompile()
