"""DeepSpeed's JSON: the section of burst, DeepSpeed's own settings, and what is refused of both."""
