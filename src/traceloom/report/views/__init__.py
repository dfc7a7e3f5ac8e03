"""How a document is drawn: one package per format, none of which knows what a section is about."""
