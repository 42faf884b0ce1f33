"""DeepSpeed's JSON: the section of burst, DeepSpeed's own settings, and refusals of both.

section   the section "burst_attention": its keys, its errors, its reference page
settings  DeepSpeed's settings that matter here
refusals  what of a JSON file or a batch is refused
"""
