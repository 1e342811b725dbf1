"""Why the planner's winner wins, in words with numbers."""
from onchip.roofline.hardware import GPU
from onchip.roofline.planner import ON_SM, Plan, Ranking
from onchip.roofline.tiles import register_cap


def parts(plan: Plan) -> dict[str, float]:
    """The terms that add up to the predicted time, in seconds: the binding roof and, where an SM binds, what comes on top of it."""
    terms = {plan.binding: plan.roofs[plan.binding]}
    if plan.binding in ON_SM:
        terms |= {"taking turns": plan.turns, "latency": plan.latency}
    return terms | ({"pre- and postprocess": plan.other} if plan.other else {})


def why_slower(loser: Plan, winner: Plan) -> str:
    """The term that costs `loser` most against `winner`, and by how much."""
    if loser.time == winner.time:
        return f"{loser.config} is as fast but takes {loser.footprint.smem} B of shared memory against {winner.footprint.smem} B"
    theirs, ours = parts(loser), parts(winner)
    roof, least = theirs[loser.binding], ours[winner.binding]
    extra = {term: theirs.get(term, 0.0) - ours.get(term, 0.0) for term in ("taking turns", "latency")} | {"roof": roof - least}
    term = max(extra, key=lambda name: extra[name])
    if term == "latency":
        why = f"{_time(extra[term])} more load latency shows, with {_count(loser.config.stages, 'stage')} against {winner.config.stages}"
    elif term == "taking turns":
        why = f"matmul and softmax take turns {_time(extra[term])} longer, with {_turns(loser, winner)}"
    elif loser.binding != winner.binding:
        why = f"{loser.binding} takes {_time(roof)}, the winner's {winner.binding} {_time(least)}"
    elif loser.binding in ON_SM and winner.balance / loser.balance - 1 > (roof / least - 1) / 2:
        why = f"its grid loads the SMs less evenly, the average one {loser.balance:.1%} of the busiest against {winner.balance:.1%}"
    else:
        why = f"{roof / least - 1:.1%} more work for the roof that binds both, {loser.binding}"
    return f"{loser.config} is {loser.time / winner.time - 1:.1%} slower: {why}"


def hides_latency(plan: Plan, gpu: GPU) -> str:
    """What covers the latency of loads, in place of the occupancy people look at."""
    config, blocks = plan.config, plan.occupancy.blocks
    ahead = f"{_count(config.stages - 1, 'tile')} ahead"
    warps = f"{_count(plan.streams, 'warp')} a scheduler, one's softmax beside another's matmul"
    if config.specialised:
        copies = f"TMA copies {ahead}" if config.stages > 1 else "TMA copies"
        how = (f"the producer warpgroup's {copies}, and {config.consumers} consumer warpgroups whose softmax runs under each other's "
               "matmuls and under their own next one")
    elif config.stages > 1:
        how = f"asynchronous copies {ahead}, and {warps}"
    else:
        how = f"the copy of V under QKᵀ and of K under PV, {_count(blocks, 'block')} an SM, and {warps}"
    return (f"Occupancy is {plan.occupancy.fraction:.2%}, which is not the goal: what hides latency here is {how}; the accumulators take "
            f"{plan.footprint.registers} of {register_cap(plan.footprint, gpu)} registers a thread")


def explain(ranking: Ranking, gpu: GPU, dtype: str) -> list[str]:
    """Sentences on a ranking: the winner, its grid, what hides its latency, why the runner-up loses, and what was left out."""
    winner, *others = ranking.plans
    binds = winner.roofs[winner.binding]
    below = [f"{name} ({seconds / binds:.0%} of it)" for name, seconds in winner.ranked if name != winner.binding]
    grid = f"{_count(winner.blocks, 'thread block')} on {gpu.sms} SMs"
    lines = [
        f"{winner.config} wins with {_time(winner.time)}, {100 * winner.tflops * 1e12 / gpu.matmul_rate(dtype):.3g}% of the {gpu.title}'s "
        f"peak in useful work, bound by {winner.binding}; next {', '.join(below[:2])}",
        f"{grid} leave {gpu.sms - winner.blocks} of them without work" if winner.blocks < gpu.sms else
        f"{grid}: the average SM has {winner.balance:.1%} of the busiest one's work",
        hides_latency(winner, gpu),
    ]
    if others:
        lines.append(f"The runner-up {why_slower(others[0], winner)}")
    left_out = []
    if ranking.refused:
        # the nearest miss that this card could have run, had it a little more
        nearest = min(ranking.refused, key=lambda refused: (refused[0].config.specialised and gpu.capability != (9, 0), refused[0].smem))
        left_out.append(f"{len(ranking.refused)} that cannot launch ({nearest[0].config} {nearest[1]})")
    if ranking.spilling:
        left_out.append(f"{len(ranking.spilling)} that would spill registers")
    if left_out:
        lines.append(f"Left out: {' and '.join(left_out)}")
    return [f"{line}." for line in lines]


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'s' * (number != 1)}"


def _turns(loser: Plan, winner: Plan) -> str:
    """How two plans differ in what lets matmul and softmax overlap."""
    differ = []
    if loser.streams != winner.streams:
        differ.append(f"{_count(loser.streams, 'warp')} a scheduler against {winner.streams:g}")
    mine, other = ((plan.config.br, plan.config.bc) for plan in (loser, winner))
    if mine != other or not differ:
        differ.append(f"{mine[0]}×{mine[1]} scores a step against {other[0]}×{other[1]}")
    return ", ".join(differ)
