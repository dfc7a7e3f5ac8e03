"""The fleet's service: takes what agents send, joins it, has it analysed, and answers."""
