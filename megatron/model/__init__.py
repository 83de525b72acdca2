"""The GPT model as plain modules.

The modules know a tensor-parallel group, but no data or pipeline parallelism. gpt.py composes
embedding.py, layer.py (norm.py, attention.py with rotary.py, mlp.py) and the output layer; init.py
initializes parameters; flops.py counts operations (without torch); huggingface.py and
huggingface_config.py convert GPT-2 and Llama; generation.py samples text; likelihood.py scores it.
blocked_attention.py and gelu.py replace slow CPU code of torch.

dc_transformer.py translates: layers of dynamic_convolution.py, the loss of label_smoothing.py;
dc_transformer_shapes.py counts its parameters and operations, beam_search.py searches translations.
"""
