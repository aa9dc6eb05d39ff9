"""The papers' models in sympy: memory, communication, bandwidth and efficiency, and the time of a step.

ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC '20).
ZeRO-Infinity: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning"
(SC '21).
"""
