"""DeepSpeed's JSON: the section of burst, DeepSpeed's own settings, and refusals of both."""
