"""What the experiment scripts share: prompts, drafters by name, timed runs, numbers, results, tables."""
