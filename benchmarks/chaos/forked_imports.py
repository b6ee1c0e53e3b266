"""What the roles import late: imported by name, since transformers resolves its classes when they are asked for."""

import peft  # noqa: F401
import s3fs  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
