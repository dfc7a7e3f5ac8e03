"""From traces to the graph: what each thing waited for, and how that is known."""
