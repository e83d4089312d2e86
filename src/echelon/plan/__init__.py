"""How to train: the plan language, one line of terms, as a value that is valid whenever it exists.

    dp4.tp2.pp2+zero1+int8
    mesh        modifiers, in any order

| term | meaning |
|---|---|
| `dp[N]` `tpN` `ppN` | mesh axes joined by `.`; `dp` without number takes the workers that are left |
| `zero1` `zero2` `zero3` | what is sharded over dp |
| `gpipe` `1f1b` `interleaved` `zerobubble` | pipeline schedule (1f1b) |
| `ring` `tree` `star` `hier` | aggregation topology (chosen by size and hosts) |
| `ps` `ps:servers=2,replicas=2,tiers=2,groups=2,reads=strong` | parameter server instead of collectives |
| `sync` `async` `bounded:K` `local:H` `local:H,sites=2` | when replicas agree (sync) |
| `fp16` `bf16` `int8` `int4` `sign` `topk:F` `randk:F` `lowrank:R` `adapt`, then `zstd` | what goes over the wire |

A mesh that names axes but no `dp` has one replica; no mesh at all is `dp`. The canonical text always names the mesh,
then what is not the default, in this table's order. `zstd` alone is a lossless codec; behind another one it packs what
that one left.

Refused because the terms contradict each other, whatever the job:
- a pipeline schedule without `pp2` or more: nothing is in a pipeline;
- a topology with `ps`: gradients go to the servers, not round a ring;
- `zero` with `ps`: the servers hold the shards already;
- `async` or `bounded:K` without `ps`: only a server can apply one worker's update while the others compute;
- `local` with sites and `ps`: both name the set that is synchronous inside (a server plan calls it groups);
- `zero` with `local:H` and no sites: every worker is a site of its own, so nobody is left to shard with;
- more sites or groups than `dp`.

Everything else is a question of what has been built, which `assemble` answers.
"""

from __future__ import annotations

from echelon.plan.parts import Agreement, Codec, Served
from echelon.plan.value import Plan

__all__ = ["Plan", "Agreement", "Codec", "Served"]
