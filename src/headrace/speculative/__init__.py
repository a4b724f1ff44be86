"""Speculation: several tokens of a sequence in one step, the same answer.

A token is a function of (logits row, seed, position), so a draft is verified by equality with what is sampled anyway:
greedy and seeded alike, without a rejection sampler (Leviathan et al. 2023 need one because their samples are drawn
anew).

What lives here: who proposes, how many, and what is accepted. What may not: planning (scheduler/), the forward pass
(worker/).
"""
