"""Makes the tasks of ``suite/long_answers.jsonl``, each with a right answer and one with a wrong step in its middle."""
