"""Default sizes of trees and bursts, where the options leave them open. Fixed numbers, found by measurement."""

from __future__ import annotations

from dataclasses import replace

from slipstream.types import Plan

# -- rows of a pass ---------------------------------------------------------------------------------------------------

# Rows of all trees of a pass on a GPU. Up to the first number, reading the weights costs more than computing; up to the
# second, trees of four rows still pay. Larger batches share the second, with at least two rows each.
_ROWS_GPU, _MOST_ROWS_GPU = 128, 256
_SMALL_TREE, _LEAST_TREE = 4, 2
_TREE_ROWS, _TREES = (64, 32, 16, 8, 4, 2), 4  # of trees among which a policy picks, and how many it has at most
# A level costs a pass of one layer. On a CPU it is skipped if none of its nodes would be offered; on a GPU never.
_DEPTH_CPU, _DEPTH_GPU = 8, 6
# The joint probability from which a node is worth its row on a CPU: where a row costs about 4% of a pass, and where it
# costs 5% to 16%, depending on the memory bandwidth.
_WORTH_ON_CPU, _WORTH_OF_EXPENSIVE_ROWS = 0.07, 0.2
_FEW_ROWS, _DEPTH_OF_FEW_ROWS = 7, 6  # with fast GEMMs a level also costs a tenth of a pass

LEAST_CHAIN = 7  # nodes of a chain alone in rounds: a shorter one brings too little to look for matches in all texts
DEPTH_OF_BLOCK = 12  # levels of a head that drafts a block in one pass, if its block has as many

# -- rounds of a burst ------------------------------------------------------------------------------------------------

PLAIN_ROUNDS = 16  # at most: streams and prompts wait that long
TREE_ROUNDS = 8
WAITING_ROUNDS = 4  # plain rounds, while a drafter has nothing to draft
SHARED_ROUNDS = 2  # while the host has a prompt or a sequence to run
_ENDED = 8  # a burst stops when 1 / _ENDED of its lanes have finished


def host_tree(asked: Plan, *, on_cpu: bool, cheap_rows: int, expensive_rows: bool) -> Plan:
    """The tree of a trained head on the host. `asked`: the options' plan, where 0 leaves depth or nodes open."""
    deepest = _DEPTH_CPU if on_cpu else _DEPTH_GPU
    if asked.nodes or asked.branch == 1:
        depth = asked.depth or deepest
        return replace(asked, depth=depth, nodes=asked.nodes or depth)
    few = on_cpu and cheap_rows <= _FEW_ROWS
    deepest = min(_DEPTH_OF_FEW_ROWS, cheap_rows - 1) if few else deepest
    plan = replace(asked, depth=asked.depth or deepest, nodes=cheap_rows - 1)
    worth = _WORTH_OF_EXPENSIVE_ROWS if few or expensive_rows else _WORTH_ON_CPU
    return replace(plan, min_confidence=asked.min_confidence or worth) if on_cpu else plan


def device_tree(host: Plan, lanes: int, *, fixed_depth: bool) -> Plan:
    """The tree of each of `lanes` sequences in one round; they share the rows that are nearly free.

    `host`: the plan of a single sequence, whose nodes were left open. `fixed_depth`: the depth was not.
    """
    least = max(_LEAST_TREE, min(_SMALL_TREE, _MOST_ROWS_GPU // lanes))
    rows = max(least, min(1 + host.nodes, _ROWS_GPU // lanes))
    levels = host.depth if fixed_depth else min(host.depth, rows.bit_length())  # small trees are shallow
    return replace(host, nodes=rows - 1, depth=levels, branch=min(host.branch, rows - 1))


def most_nodes(lanes: int) -> int:
    """Nodes of each of `lanes` trees in one round at most; 0 if there is no room for any."""
    return _MOST_ROWS_GPU // lanes - 1


def round_trees(largest: Plan, lanes: int, *, fixed_depth: bool) -> list[Plan]:
    """The trees among which the policy picks for rounds of so many lanes, the largest first: few, as each is captured.

    `largest`: of a lone sequence; each has at most half the rows of the one before. `fixed_depth`: its depth was given.
    """
    found: list[Plan] = []
    room = 1 + min(largest.nodes, most_nodes(lanes)) if largest.drafts else 0
    for rows in sorted({1 + largest.nodes, *_TREE_ROWS}, reverse=True):
        if rows <= room and len(found) < _TREES:
            whole = fixed_depth or largest.branch == 1 or rows == 1 + largest.nodes
            depth = min(largest.depth, rows - 1 if whole else rows.bit_length())  # small trees are shallow
            found.append(replace(largest, nodes=rows - 1, depth=depth, branch=min(largest.branch, rows - 1)))
            room = rows // 2
    return found


def most_rounds(*, drafts: bool, passive: bool) -> int:
    """Rounds of a burst at most: with trees, without a drafter, or while a drafter has nothing to draft."""
    return TREE_ROUNDS if drafts else PLAIN_ROUNDS if passive else WAITING_ROUNDS


def stops_burst(finished: int, lanes: int) -> bool:
    """Whether so many of a burst's lanes have finished that the rest of its rounds is not worth running."""
    return _ENDED * finished >= lanes
