"""The models as plain modules: GPT, three image classifiers and a DC-Transformer.

The modules of GPT know a tensor-parallel group, but no data or pipeline parallelism. gpt.py
composes embedding.py, layer.py (norm.py, attention.py with rotary.py, mlp.py) and the output layer;
init.py initializes parameters; flops.py counts operations (without torch); huggingface.py and
huggingface_config.py convert GPT-2 and Llama; generation.py samples text; likelihood.py scores it.
blocked_attention.py and gelu.py replace slow CPU code of torch.

wide_resnet.py, vgg.py and resnet.py are the image classifiers, made of the layers of
convolution.py and batch_norm.py; image_classifier.py adds the loss and the accuracy, and
image_shapes.py counts parameters and operations (without torch). dc_transformer.py translates with
the layers of dynamic_convolution.py and the loss of label_smoothing.py; dc_transformer_shapes.py
counts its parameters and operations (without torch), and beam_search.py searches translations.
"""
