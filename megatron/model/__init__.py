"""The GPT model as plain modules.

They know a tensor-parallel group at most, nothing of data or pipeline parallelism.

gpt.py composes embedding.py, layer.py (norm.py, attention.py with rotary.py, mlp.py) and the
output layer; init.py gives every parameter its first value; flops.py counts (without torch);
huggingface.py converts GPT-2 weights; generation.py samples text. linear.py,
blocked_attention.py and gelu.py are what torch does too slowly on a CPU.
"""
