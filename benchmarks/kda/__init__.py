# SPDX-License-Identifier: Apache-2.0
"""Times the KDA ops: python -m benchmarks.kda --all --out benchmarks/results/kda_h200.json

Method. A CUDA graph holds back-to-back calls over copies of a layer, so many that they make 240 MB of
distinct bytes (283 / 164 / 90 / 48 for the verify ops at N 1 / 2 / 4 / >= 8), so every call finds its states,
caches, rows and weights in HBM; slots and pending counts are shared by the layers, as in a model. The graphs
of all arms of one size are replayed in turn; a figure is the median over turns of replay time / calls, the
spread the distance between the quartiles. Every arm is first compared with its reference, and a copy must
reach 3.6 TB/s at N 64; else no figure is printed. Prompts are not captured, as the engine does not either:
their arms' calls are launched one by one.

Comparisons, each with the ops of `catalog.OPS` that it finds and a `copy` of the bytes of its first op:

verify   `records`, `replay`, `intermediate`: a verify round in each scheme, from projection rows to gated
         output, the last with its promotion where P > 0; `records_bf16_conv`: with conv caches in bf16.
         `fla_states`, `fla_replay`: fla-core's fused_recurrent_kda alone (no f_b, convolution or output
         norm), keeping the state of every token, or running 7 accepted tokens again before the 8.
decode   `decode`: one token per request.
attn     `attn`: projection and verify of one request in one op; `projection_then_verify`: one after the
         other; `weight_pass`: the projection's weight read once.
prefill  `prefill`: a prompt of T tokens; `fla_core`: fla-core's chunk_kda alone.

`after_predecessor`: us that an op adds behind a kernel that writes its rows, waits for what ran before and
lets the op start early (programmatic dependent launch); 12 copies of a layer, no promotion.
"""
