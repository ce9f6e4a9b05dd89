"""What requests cost: budgets, what is charged to them, and what was used."""
