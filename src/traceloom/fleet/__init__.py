"""What the fleet's tables answer: one file per question, each a function of lazy frames. docs/concepts/fleet.md."""
