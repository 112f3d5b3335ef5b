"""Assisted generation with transformers, one prompt at a time."""

from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained('org/target')
tokenizer = AutoTokenizer.from_pretrained('org/target')
draft = AutoModelForCausalLM.from_pretrained('me/draft')
draft.generation_config.num_assistant_tokens = 3
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0
prompt = tokenizer("Speculative decoding is", return_tensors="pt")
output = target.generate(**prompt, assistant_model=draft, do_sample=False, max_new_tokens=64)
print(tokenizer.decode(output[0]))
