"""Questions to the fleet's tables, declared once; routes, verbs and pages are made of the declarations."""
