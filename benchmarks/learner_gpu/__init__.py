"""A whole LoRA GRPO step on one GPU: the learner's own, in turns with PEFT and TRL's, on the same batches."""

import os

# Before torch is there: providers that cut their work differently take turns with one allocator, and without this
# each would find what the other's sizes left of the memory.
for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
    os.environ.setdefault(_name, "expandable_segments:True")
